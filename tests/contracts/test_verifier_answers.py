"""What every verifier of one answer keeps to in whole responses: an answer counts once, and only where it is given."""

import random
from collections.abc import Iterator

import pytest
from helpers.answers import (
    BLOCKS,
    CATALOGUE,
    DENIED,
    HEDGED,
    LEFT_OPEN,
    SECOND,
    Label,
    denials,
    expect_none,
    rivals,
    time_limit,
)

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item, Verifier

ALL_KINDS = frozenset(label.kind for label in CATALOGUE)
# name -> (the verifier, the kinds of labels that it reads)
READS: dict[str, tuple[Verifier, frozenset[str]]] = {
    "math": (get_verifier("math"), ALL_KINDS),
    "choice": (get_verifier("choice"), frozenset({"choice", "lettered"})),
    "number": (get_verifier("number"), frozenset({"number", "percentage", "money", "quantity"})),
    "exact": (get_verifier("exact"), ALL_KINDS),
    "list": (get_verifier("list"), frozenset({"list", "set"})),
    "unordered list": (get_verifier("list", unordered=True), frozenset({"list", "set"})),
}
NOT_A_LIST = frozenset({"14 or 15", r"\pm 3", "AC", r"\emptyset"})
TWO_BLOCKS = (r"\boxed{{{}}} \boxed{{{}}}", "<answer>{}</answer><answer>{}</answer>", "<answer>{}</answer> {}")
RESPONSES = 1500
EVERY = pytest.mark.parametrize("name", READS)


def labels_of(name: str) -> list[Label]:
    labels = [label for label in CATALOGUE if label.kind in READS[name][1]]
    if "list" in name:
        return [label for label in labels if label.text not in NOT_A_LIST]
    # A word is found without the command around it, and `exact` wants the same characters.
    return [label for label in labels if name != "exact" or r"\text" not in label.text]


def is_right(name: str, response: str, label: str) -> bool:
    item = Item(prompt="", response=response, label=label)
    quick = READS[name][0].quick_score(item)
    if quick is not None:
        return quick.parts["accuracy"] == 1.0
    try:
        with time_limit():
            return READS[name][0].score(item).parts["accuracy"] == 1.0
    except TimeoutError:
        return False


def two_labels(name: str) -> Iterator[tuple[random.Random, Label, Label]]:
    """Pairs of labels of one kind that no answer may share, each with the source of what is drawn for it."""
    rng, labels = random.Random(name), labels_of(name)
    opposed = [(label, others) for label in labels if (others := rivals(label, of=labels))]
    for _ in range(RESPONSES):
        label, others = rng.choice(opposed)
        yield rng, label, rng.choice(others)


@EVERY
@pytest.mark.parametrize("block", BLOCKS)
def test_an_answer_is_found_in_every_layout_of_a_response(name: str, block: str):
    given_in = [(block.format(label.text), label.text) for label in labels_of(name)]
    expect_none(pair for pair in given_in if not is_right(name, *pair))


@EVERY
def test_an_answer_that_is_taken_back_or_left_open_is_wrong_in_every_layout(name: str):
    rng, labels = random.Random(name), labels_of(name)
    drawn = [rng.choice(labels) for _ in range(RESPONSES)]
    taken_back = [
        (rng.choice(BLOCKS).format(rng.choice([*denials(label), *LEFT_OPEN]).format(label.text)), label.text)
        for label in drawn
    ]
    expect_none(pair for pair in taken_back if is_right(name, *pair))


@EVERY
def test_two_answers_are_right_for_neither_in_every_layout(name: str):
    # Of two lines, the last may be the answer.
    frames = [frame for frame in HEDGED if "\n" not in frame]
    hedged = [
        (rng.choice(BLOCKS).format(rng.choice(frames).format(label.text, other.text)), rng.choice((label, other)).text)
        for rng, label, other in two_labels(name)
    ]
    expect_none(pair for pair in hedged if is_right(name, *pair))


@EVERY
def test_a_response_is_right_for_at_most_one_of_two_answers(name: str):
    frames = [*SECOND, *HEDGED, *TWO_BLOCKS, *(frame + " {}" for frame in DENIED)]
    two = [
        (
            rng.choice(("{}", "<answer>{}</answer>")).format(rng.choice(frames).format(label.text, other.text)),
            label.text,
            other.text,
        )
        for rng, label, other in two_labels(name)
    ]
    expect_none(
        (response, f"{label} and {other}")
        for response, label, other in two
        if is_right(name, response, label) and is_right(name, response, other)
    )


@pytest.mark.parametrize("label", [label for label in CATALOGUE if label.kind in ("choice", "lettered")], ids=repr)
def test_both_readers_of_choices_take_the_same_spellings(label: Label):
    """`math` and `choice` judge a letter alike, with and without the option's text."""
    responses = [
        layout.format(text) for text in label.spellings for layout in ("{}", "<answer>{}</answer>", r"\boxed{{{}}}")
    ]
    expect_none((response, label.text) for response in responses if not is_right("choice", response, label.text))
    expect_none((response, label.text) for response in responses if not is_right("math", response, label.text))
