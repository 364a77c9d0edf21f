"""What must hold of every answer to a verifier that measures, whatever it is: nothing is won by covering several labels."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remote_rm.box_verifier import Box, iou
from remote_rm.edit_distance_verifier import EditDistanceVerifier, edit_distance, similarity
from remote_rm.registry import get_verifier
from remote_rm.verifier import Item, Score
from remote_rm.vqa_verifier import normalize_answer

generated = settings(max_examples=150, deadline=None, derandomize=True, database=None)

Corners = tuple[float, float, float, float]


def sized(left: int, top: int, width: int, height: int) -> Corners:
    return (left, top, left + width, top + height)


corners = st.builds(sized, st.integers(0, 200), st.integers(0, 200), st.integers(1, 200), st.integers(1, 200))
several = st.lists(corners, min_size=1, max_size=5)
words = st.text(alphabet="abcd é", min_size=1, max_size=12).filter(str.strip)
hostile = st.one_of(
    st.sampled_from(
        ["nan", "NaN", "Infinity", "-inf", "1e999", "-1", "null", "true", '"4"', "9" * 500, "", "[", "{", "()"]
    ),
    st.floats().map(str),
    st.integers().map(str),
)


def judged(name: str, answer: str, label: str) -> Score:
    return get_verifier(name).score(Item(prompt="", response=f"<answer>{answer}</answer>", label=label))


def boxes(answer: list[Corners], label: list[Corners]) -> Score:
    return judged("box", json.dumps(answer), json.dumps(label))


def as_box(found: Corners) -> Box:
    return Box(corners=found)


@generated
@given(one=corners, other=corners)
def test_an_overlap_is_symmetric_bounded_and_whole_for_a_box_with_itself_alone(one: Corners, other: Corners):
    overlap = iou(as_box(one), as_box(other))
    assert overlap == iou(as_box(other), as_box(one))
    assert 0.0 <= overlap <= 1.0
    assert iou(as_box(one), as_box(one)) == 1.0
    assert (overlap == 1.0) == (one == other)


@generated
@given(answer=several, label=several)
def test_boxes_without_a_partner_count_nothing(answer: list[Corners], label: list[Corners]):
    score = boxes(answer, label)
    assert 0.0 <= score.score <= min(len(answer), len(label)) / max(len(answer), len(label)) + 1e-9
    assert score.parts["accuracy"] <= (len(answer) == len(label))
    assert boxes(label, label).score == 1.0
    assert boxes(label, label).parts["accuracy"] == 1.0


@generated
@given(label=several, guesses=several)
def test_every_guess_beside_the_right_boxes_costs(label: list[Corners], guesses: list[Corners]):
    for count in range(1, len(guesses) + 1):
        score = boxes([*label, *guesses[:count]], label)
        assert score.score == pytest.approx(len(label) / (len(label) + count))
        assert score.parts["accuracy"] == 0.0


@generated
@given(
    values=st.lists(hostile, min_size=1, max_size=6),
    frame=st.sampled_from(
        (
            "[{}]",
            "[[{}]]",
            '{{"bbox_2d": [{}]}}',
            '{{"bbox": {}}}',
            "({0}),({0})",
            "{}",
            '[{{"box": [{}], "label": 4}}]',
        )
    ),
    label=st.sampled_from(("[0, 0, 10, 10]", "[]")),
)
def test_malformed_boxes_never_raise_and_never_meet_an_empty_list(values: list[str], frame: str, label: str):
    answer = frame.format(", ".join(values))
    score = judged("box", answer, label)
    assert 0.0 <= score.score <= 1.0
    if label == "[]":
        assert (score.score == 1.0) == (answer.strip() == "[]"), answer
    assume(answer.strip())
    assert 0.0 <= judged("box", "[0, 0, 10, 10]", answer).score <= 1.0


@generated
@given(one=words, other=words, third=words)
def test_likeness_is_symmetric_bounded_and_whole_for_the_same_text_alone(one: str, other: str, third: str):
    assert similarity(one, other) == similarity(other, one)
    assert 0.0 <= similarity(one, other) <= 1.0
    assert (similarity(one, other) == 1.0) == (one == other)
    assert edit_distance(one, third) <= edit_distance(one, other) + edit_distance(other, third)
    assert abs(len(one) - len(other)) <= edit_distance(one, other) <= max(len(one), len(other))


@generated
@given(
    one=words,
    other=words,
    frame=st.sampled_from(("{} or {}", "{}, {}", "{}\n{}", "{} {}", "{}/{}", "{} ({})", "{}; {}")),
)
def test_no_text_is_right_for_two_labels(one: str, other: str, frame: str):
    assume(one.split() != other.split())
    text = frame.format(one, other)
    for answer in (one, other, text):
        assert sum(judged("edit_distance", answer, label).parts["accuracy"] for label in (one, other)) <= 1
    assume(normalize_answer(one) != normalize_answer(other))
    for answer in (one, other, text):
        unanimous = [json.dumps([label] * 10) for label in (one, other)]
        assert sum(judged("vqa", answer, label).parts["accuracy"] for label in unanimous) <= 1


@generated
@given(gold=words, more=st.lists(words, min_size=1, max_size=4))
def test_the_nearest_gold_counts_and_their_order_does_not(gold: str, more: list[str]):
    verifier = EditDistanceVerifier()
    several, alone = [gold, *more], [verifier.grade("abcd", text).values[0] for text in (gold, *more)]
    assert verifier.grade("abcd", json.dumps(several)).values[0] == max(alone)
    assert verifier.grade("abcd", json.dumps(several[::-1])).values[0] == max(alone)
    assert verifier.grade(gold, json.dumps(several)).is_right
