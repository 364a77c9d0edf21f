"""Responses that other searches have found are right for one label at most, and a denied answer is not paid."""

from fractions import Fraction

import pytest
from helpers.tables import table

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

# What other seeds have found.
FOUND = table("remote_rm/answer_adversary", "found")


@pytest.mark.parametrize(("response", "label", "other"), FOUND)
def test_what_was_found_is_right_for_one_label_at_most(response: str, label: str, other: str):
    for name in ("math", "number", *(["list"] if "," in label else [])):
        verifier = get_verifier(name)
        items = [Item(prompt="", response=response, label=text) for text in (label, other)]
        assert sum(verifier.score(item).parts["accuracy"] for item in items) <= 1, name


DENIALS = table("remote_rm/answer_denials", "denials")


def test_a_denied_answer_is_not_paid():
    given = [
        (block.format(frame.format(label)), label)
        for frame in DENIALS
        for label in table("remote_rm/answer_denials", "labels")
        for block in ("{}", "<think>a</think><answer>{}</answer>")
        # `Wait, no.` says no.
        if label != "No" or not frame.rstrip(".").endswith("no")
    ]
    paid = [pair for pair in given if is_paid("math", *pair)]
    assert len(paid) <= 0.002 * len(given), paid


def test_no_stance_but_agreement_is_paid():
    leads, stances = (table("remote_rm/answer_stances", name) for name in ("leads", "stances"))
    frames = [lead + stance for name in leads for lead in leads[name] for stance in stances[name]]
    frames += table("remote_rm/answer_stances", "sentences")
    given = [
        (block.format(frame.format(label)), label)
        for frame in frames
        for label in table("remote_rm/answer_stances", "labels")
        for block in ("{}", "<think>a</think><answer>{}.</answer>")
    ][::7]
    assert [pair for pair in given if is_paid("math", *pair)] == []


@pytest.mark.parametrize(
    "relation", [" = ", " ≈ ", r" \approx ", " ≡ ", "~", " < ", r" \to ", " => ", ":", " or ", " to "]
)
def test_one_string_of_all_fractions_is_right_for_none(relation):
    fractions = sorted({Fraction(top, bottom) for bottom in range(2, 12) for top in range(1, bottom)})
    for text in map(str, fractions[::12]):
        chain = relation.join(["0", "1", *map(str, fractions), text])
        labels = [label for label in ("1", *map(str, fractions)) if is_paid("math", chain, label)]
        # `1 < 2` and `3 => 4` end in their last side.
        assert labels in ([], [text]), chain


def test_a_copied_question_is_not_paid():
    paid = []
    for question, *options in table("remote_rm/copied_questions", "questions"):
        for layout in table("remote_rm/copied_questions", "layouts"):
            copied = layout.format(q=question, **dict(zip("abcd", options, strict=True)))
            for response in (copied, f"<think>a</think><answer>{copied}</answer>"):
                judged = [("math", text) for text in options] + [(v, x) for v in ("math", "choice") for x in "ABCD"]
                paid += [(response, *pair) for pair in judged if is_paid(pair[0], response, pair[1])]
    assert paid == []


def is_paid(verifier: str, response: str, label: str) -> bool:
    score = get_verifier(verifier).quick_score(Item(prompt="", response=response, label=label))
    return score is not None and score.score == 1.0
