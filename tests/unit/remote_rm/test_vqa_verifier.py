import json

import pytest
from helpers.tables import table

from remote_rm.answer_verifier import Weights
from remote_rm.verifier import Item, Score
from remote_rm.vqa_verifier import VqaVerifier

pytestmark = pytest.mark.unit

SEVEN_AND_THREE = json.dumps(["two dogs"] * 7 + ["the dog", "dogs", "dogs"])


def scored(answer: str, label: str, **settings) -> Score:
    response = f"<think>t</think><answer>{answer}</answer>"
    verifier, item = VqaVerifier(**settings), Item(prompt="p", response=response, label=label)
    score = verifier.score(item)
    assert verifier.quick_score(item) in (score, None)
    return score


@pytest.mark.parametrize(
    ("answer", "vqa", "soft", "is_right"),
    table("remote_rm/vqa_verifier", "the_score_is_the_share_of_people_who_said_so"),
)
def test_the_score_is_the_share_of_people_who_said_so(answer, vqa, soft, is_right):
    score = scored(answer, SEVEN_AND_THREE)
    parts = {"accuracy": is_right, "vqa": vqa, "soft": soft, "format": 1.0, "ungradable": 0.0}
    assert score.parts == pytest.approx(parts)
    assert (score.score, score.reward) == pytest.approx((vqa, vqa + 0.5))


def test_likeness_counts_by_its_weight():
    weights = Weights(accuracy=0.5, format=1.0)
    score = scored("dogs", SEVEN_AND_THREE, weights=weights, soft_weight=0.5)
    assert score.reward == pytest.approx(0.5 * 0.6 + 0.5 * (2.75 / 3) + 1.0)
    assert score.score == pytest.approx(0.6)


def test_the_label_may_be_annotations_or_one_answer():
    annotations = json.dumps(
        [{"answer": "net", "answer_confidence": "yes", "answer_id": place} for place in range(10)]
    )
    assert scored("a net", annotations).score == 1.0
    assert scored("the net", "net").score == 1.0
    assert scored("mesh", "net").score == 0.0


@pytest.mark.parametrize("label", ["[]", '["", "?!"]', json.dumps(["x" * 3000] * 10)])
def test_a_label_in_which_nobody_answers_is_reported_as_ungradable_and_never_scores(label):
    for answer in ("", "x", "?!"):
        score = scored(answer, label)
        assert score.parts == {"accuracy": 0.0, "vqa": 0.0, "soft": 0.0, "format": 1.0, "ungradable": 1.0}


def test_a_long_answer_is_wrong_and_long_texts_are_left_to_a_worker():
    assert scored("net " * 251, json.dumps(["net " * 251] * 10)).score == 0.0
    label = json.dumps(["x" * 900] * 10)
    item = Item(prompt="p", response=f"<answer>{'x' * 900}</answer>", label=label)
    assert VqaVerifier().quick_score(item) is None
    assert VqaVerifier().score(item).score == 1.0


def test_the_answer_that_a_label_wants_is_the_commonest():
    assert VqaVerifier().answer_of(SEVEN_AND_THREE) == "2 dogs"
