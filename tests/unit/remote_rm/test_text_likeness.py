"""The verifiers `vqa` and `edit_distance`, and the distance that both measure by."""

import json
import time

import pytest
from helpers.tables import table
from helpers.verifiers import scored
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rm.answer_verifier import Weights
from remote_rm.edit_distance_verifier import EditDistanceVerifier, edit_distance, similarity
from remote_rm.verifier import Item
from remote_rm.vqa_verifier import VqaVerifier, normalize_answer, vqa_accuracy

SEVEN_AND_THREE = json.dumps(["two dogs"] * 7 + ["the dog", "dogs", "dogs"])
short = st.text(alphabet="abé", max_size=9)


@pytest.mark.parametrize(
    ("answer", "vqa", "soft", "is_right"),
    table("remote_rm/vqa_verifier", "the_score_is_the_share_of_people_who_said_so"),
)
def test_the_score_is_the_share_of_people_who_said_so(answer, vqa, soft, is_right):
    score = scored("vqa", answer, SEVEN_AND_THREE)
    # An empty answer is not the format.
    kept = float(bool(answer))
    parts = {"accuracy": is_right, "vqa": vqa, "soft": soft, "format": kept, "ungradable": 0.0}
    assert score.parts == pytest.approx(parts)
    assert (score.score, score.reward) == pytest.approx((vqa, vqa + 0.5 * kept))


def test_likeness_counts_by_its_weight():
    weights = Weights(accuracy=0.5, format=1.0)
    score = scored("vqa", "dogs", SEVEN_AND_THREE, weights=weights, soft_weight=0.5)
    assert score.reward == pytest.approx(0.5 * 0.6 + 0.5 * (2.75 / 3) + 1.0)
    assert score.score == pytest.approx(0.6)


def test_the_label_may_be_annotations_or_one_answer():
    annotations = [{"answer": "net", "answer_confidence": "yes", "answer_id": place} for place in range(10)]
    assert scored("vqa", "a net", json.dumps(annotations)).score == 1.0
    assert scored("vqa", "the net", "net").score == 1.0
    assert scored("vqa", "mesh", "net").score == 0.0


def test_a_long_answer_is_wrong_and_long_texts_are_left_to_a_worker():
    assert scored("vqa", "net " * 251, json.dumps(["net " * 251] * 10)).score == 0.0
    item = Item(prompt="p", response=f"<answer>{'x' * 900}</answer>", label=json.dumps(["x" * 900] * 10))
    assert VqaVerifier().quick_score(item) is None
    assert VqaVerifier().score(item).score == 1.0


@pytest.mark.parametrize(("answer", "normalized"), table("remote_rm/answers/vqa", "answers_are_spelled_alike"))
def test_answers_are_spelled_alike(answer, normalized):
    assert normalize_answer(answer) == normalized
    assert normalize_answer(normalized) == normalized


@pytest.mark.parametrize(
    ("people", "others", "expected"),
    [
        # Of four who agree, each nine of ten hold three or more; of three, the seven nines with all, three with two.
        *(
            (people, 10 - people, share)
            for people, share in ((0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0))
        ),
        # Of other numbers three are enough, or all.
        *((1, 0, 1.0), (1, 1, 0.5), (2, 0, 1.0), (1, 2, 1 / 3), (2, 3, 2 / 3), (3, 2, 1.0), (4, 7, 1.0), (0, 2, 0.0)),
    ],
)
def test_the_share_of_people(people, others, expected):
    assert vqa_accuracy("net", ["net"] * people + ["mesh"] * others) == pytest.approx(expected)


def test_no_answer_is_nobodys():
    assert vqa_accuracy("", [""] * 10) == 0.0
    assert vqa_accuracy("net", []) == 0.0


@pytest.mark.parametrize(
    ("answer", "label", "anls", "is_right"),
    table("remote_rm/edit_distance_verifier", "the_score_is_the_likeness_to_the_nearest_gold"),
)
def test_the_score_is_the_likeness_to_the_nearest_gold(answer, label, anls, is_right):
    score = scored("edit_distance", answer, label)
    kept = float(bool(answer))
    assert score.parts == pytest.approx({"accuracy": is_right, "anls": anls, "format": kept, "ungradable": 0.0})
    assert (score.score, score.reward) == pytest.approx((anls, anls + 0.5 * kept))


def test_the_threshold_is_a_setting():
    assert scored("edit_distance", "abxy", "abcd", anls_threshold=1.0).score == 0.5
    assert scored("edit_distance", "ab", "abcd", anls_threshold=1.0).score == 0.5
    assert scored("edit_distance", "abcx", "abcd", anls_threshold=0.25).score == 0.0
    for threshold in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="--anls-threshold must be above 0 and at most 1"):
            EditDistanceVerifier(anls_threshold=threshold)


def test_long_texts_are_left_to_a_worker_and_too_long_ones_are_wrong():
    text = "ab" * 2000
    item = Item(prompt="p", response=f"<answer>{text}</answer>", label=text)
    assert EditDistanceVerifier().quick_score(item) is None
    assert EditDistanceVerifier().score(item).parts["anls"] == 1.0
    assert scored("edit_distance", "x" * 10_001, "x" * 10_000).score == 0.0


def test_the_answer_that_a_label_wants_is_the_first_gold_or_the_commonest():
    assert EditDistanceVerifier().answer_of(json.dumps(["Rye", "NY"])) == "rye"
    assert EditDistanceVerifier().answer_of("Rye") == "rye"
    assert VqaVerifier().answer_of(SEVEN_AND_THREE) == "2 dogs"


def by_the_definition(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for place, character in enumerate(one):
        above, row = row, [place + 1]
        for column, compared in enumerate(other):
            row.append(min(row[-1] + 1, above[column + 1] + 1, above[column] + (character != compared)))
    return row[-1]


@pytest.mark.parametrize(("one", "other", "distance"), table("remote_rm/answers/edit_distance", "known_distances"))
def test_known_distances(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(one=short, other=short)
def test_it_is_what_the_definition_gives(one: str, other: str):
    assert edit_distance(one, other) == by_the_definition(one, other)


def test_texts_of_more_bits_than_a_word():
    one, other = "ab" * 100, "ba" * 100 + "c"
    assert edit_distance(one, other) == by_the_definition(one, other) == 2
    started = time.process_time()
    assert edit_distance("ab" * 5000, "ba" * 5000) == 2
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("one", "other", "share"), [("kitten", "sitting", 4 / 7), ("abcd", "abcx", 0.75), ("ab", "", 0.0), ("", "", 1.0)]
)
def test_likeness_is_a_share_of_the_longer_text(one, other, share):
    assert similarity(one, other) == pytest.approx(share)
