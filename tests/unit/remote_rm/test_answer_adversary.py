"""Responses put together from labels and words are not right for two labels of which no answer may be both."""

import pytest
from helpers.answers import search
from helpers.tables import table

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit

# What other seeds have found.
FOUND = table("remote_rm/answer_adversary", "found")


@pytest.mark.parametrize(("response", "label", "other"), FOUND)
def test_what_was_found_is_right_for_one_label_at_most(response: str, label: str, other: str):
    for name in ("math", "number", *(["list"] if "," in label else [])):
        verifier = get_verifier(name)
        items = [Item(prompt="", response=response, label=text) for text in (label, other)]
        assert sum(verifier.score(item).parts["accuracy"] for item in items) <= 1, name


@pytest.mark.parametrize(
    ("seed", "responses", "max_by_sympy"),
    [(17, 10_000, 200), pytest.param(18, 20_000, 150, marks=[pytest.mark.full, pytest.mark.slow])],
)
def test_thousands_of_responses_are_right_for_no_two_labels(seed: int, responses: int, max_by_sympy: int):
    found = search(seed=seed, responses=responses, max_by_sympy=max_by_sympy)
    assert found.breaks == [], found.report()


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
