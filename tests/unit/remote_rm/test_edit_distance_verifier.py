import json

import pytest
from helpers.tables import table

from remote_rm.edit_distance_verifier import EditDistanceVerifier
from remote_rm.verifier import Item, Score

pytestmark = pytest.mark.unit


def scored(answer: str, label: str, **settings) -> Score:
    response = f"<think>t</think><answer>{answer}</answer>"
    verifier, item = EditDistanceVerifier(**settings), Item(prompt="p", response=response, label=label)
    score = verifier.score(item)
    assert verifier.quick_score(item) in (score, None)
    return score


@pytest.mark.parametrize(
    ("answer", "label", "anls", "is_right"),
    table("remote_rm/edit_distance_verifier", "the_score_is_the_likeness_to_the_nearest_gold"),
)
def test_the_score_is_the_likeness_to_the_nearest_gold(answer, label, anls, is_right):
    score = scored(answer, label)
    assert score.parts == pytest.approx({"accuracy": is_right, "anls": anls, "format": 1.0, "ungradable": 0.0})
    assert (score.score, score.reward) == pytest.approx((anls, anls + 0.5))


def test_the_threshold_is_a_setting():
    assert scored("abxy", "abcd", anls_threshold=1.0).score == 0.5
    assert scored("ab", "abcd", anls_threshold=1.0).score == 0.5
    assert scored("abcx", "abcd", anls_threshold=0.25).score == 0.0
    for threshold in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="--anls-threshold must be above 0 and at most 1"):
            EditDistanceVerifier(anls_threshold=threshold)


@pytest.mark.parametrize("label", ["[]", '[""]', '[" ", ""]', "x" * 10_001])
def test_a_label_without_a_text_is_reported_as_ungradable_and_never_scores(label):
    for answer in (label, "x"):
        assert scored(answer, label).parts == {"accuracy": 0.0, "anls": 0.0, "format": 1.0, "ungradable": 1.0}


def test_long_texts_are_left_to_a_worker_and_too_long_ones_are_wrong():
    text = "ab" * 2000
    item = Item(prompt="p", response=f"<answer>{text}</answer>", label=text)
    assert EditDistanceVerifier().quick_score(item) is None
    assert EditDistanceVerifier().score(item).parts["anls"] == 1.0
    assert scored("x" * 10_001, "x" * 10_000).score == 0.0


def test_the_answer_that_a_label_wants_is_the_first_gold():
    assert EditDistanceVerifier().answer_of(json.dumps(["Rye", "NY"])) == "rye"
    assert EditDistanceVerifier().answer_of("Rye") == "rye"
