"""What every verifier of one answer keeps to in whole responses: an answer counts once, and only where it is given."""

import pytest
from helpers.answer_catalogue import CATALOGUE, Label
from helpers.answer_frames import BLOCKS, DENIED, HEDGED, LEFT_OPEN, SECOND, rivals
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item, Verifier

pytestmark = pytest.mark.contract

# name -> (the verifier, the kinds of labels that it reads)
READS: dict[str, tuple[Verifier, set[str]]] = {
    "math": (get_verifier("math"), {label.kind for label in CATALOGUE}),
    "choice": (get_verifier("choice"), {"choice", "lettered"}),
    "number": (get_verifier("number"), {"number", "percentage", "money", "quantity"}),
    "exact": (get_verifier("exact"), {label.kind for label in CATALOGUE}),
    "list": (get_verifier("list"), {"list", "set"}),
    "unordered list": (get_verifier("list", unordered=True), {"list", "set"}),
}
NOT_A_LIST = {"14 or 15", r"\pm 3", "AC", r"\emptyset"}
EVERY = pytest.mark.parametrize("name", READS)
drawn = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def labels_of(name: str) -> list[Label]:
    labels = [label for label in CATALOGUE if label.kind in READS[name][1]]
    if "list" in name:
        return [label for label in labels if label.text not in NOT_A_LIST]
    # An expression that is a number is left to `math`.
    return [label for label in labels if name != "number" or "^" not in label.text.partition(" ")[0]]


def is_right(name: str, response: str, label: str) -> bool:
    item = Item(prompt="", response=response, label=label)
    quick = READS[name][0].quick_score(item)
    score = READS[name][0].score(item) if quick is None else quick
    return score.parts["accuracy"] == 1.0


def expect_none(wrong: list[tuple[str, str]]) -> None:
    found = sorted(set(wrong), key=lambda pair: (len(pair[0]), pair))
    assert not found, "\n".join([str(len(found)), *(f"    {one!r} for the label {two!r}" for one, two in found[:20])])


@EVERY
@pytest.mark.parametrize("block", BLOCKS)
def test_an_answer_is_found_in_every_layout_of_a_response(name: str, block: str):
    given_in = [(block.format(label.text), label.text) for label in labels_of(name)]
    expect_none([pair for pair in given_in if not is_right(name, *pair)])


@EVERY
def test_an_answer_that_is_taken_back_or_left_open_is_wrong_in_every_layout(name: str):
    @drawn
    @given(
        label=st.sampled_from(labels_of(name)),
        frame=st.sampled_from([*DENIED, *LEFT_OPEN]),
        block=st.sampled_from(BLOCKS),
    )
    def judge(label: Label, frame: str, block: str) -> None:
        response = block.format(frame.format(label.text))
        assert not is_right(name, response, label.text), response

    judge()


@EVERY
def test_two_answers_are_right_for_neither_in_every_layout(name: str):
    labels = [label for label in labels_of(name) if rivals(label, of=labels_of(name))]
    # Of two lines, the last may be the answer.
    frames = [frame for frame in HEDGED if "\n" not in frame]

    @drawn
    @given(label=st.sampled_from(labels), frame=st.sampled_from(frames), block=st.sampled_from(BLOCKS), data=st.data())
    def judge(label: Label, frame: str, block: str, data: st.DataObject) -> None:
        other = data.draw(st.sampled_from(rivals(label, of=labels)))
        response = block.format(frame.format(label.text, other.text))
        assert not is_right(name, response, label.text), response
        assert not is_right(name, response, other.text), response

    judge()


@EVERY
def test_a_response_is_right_for_at_most_one_of_two_answers(name: str):
    labels = [label for label in labels_of(name) if rivals(label, of=labels_of(name))]
    frames = [
        *SECOND,
        r"\boxed{{{}}} \boxed{{{}}}",
        "<answer>{}</answer><answer>{}</answer>",
        "<answer>{}</answer> {}",
    ]

    @drawn
    @given(label=st.sampled_from(labels), frame=st.sampled_from(frames), data=st.data())
    def judge(label: Label, frame: str, data: st.DataObject) -> None:
        other = data.draw(st.sampled_from(rivals(label, of=labels)))
        response = frame.format(label.text, other.text)
        assert not (is_right(name, response, label.text) and is_right(name, response, other.text)), response

    judge()


@pytest.mark.parametrize(
    "label", [label for label in CATALOGUE if label.kind in ("choice", "lettered")], ids=lambda label: label.text
)
def test_both_readers_of_choices_take_the_same_spellings(label: Label):
    """`math` and `choice` judge a letter alike, with and without the option's text."""
    for text in label.spellings:
        for response in (text, f"<answer>{text}</answer>", rf"\boxed{{{text}}}"):
            assert is_right("choice", response, label.text), response
            assert is_right("math", response, label.text), response
