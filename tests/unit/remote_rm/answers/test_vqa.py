import pytest
from helpers.tables import table

from remote_rm.vqa_verifier import normalize_answer, vqa_accuracy

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("answer", "normalized"),
    table("remote_rm/answers/vqa", "answers_are_spelled_alike"),
)
def test_answers_are_spelled_alike(answer, normalized):
    assert normalize_answer(answer) == normalized
    assert normalize_answer(normalized) == normalized


@pytest.mark.parametrize(
    ("people", "expected"),
    # Of four who agree, each nine hold three or more; of three, the seven nines with all of them, and three with two.
    [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)],
)
def test_of_ten_people_every_nine_are_asked(people, expected):
    assert vqa_accuracy("net", ["net"] * people + ["mesh"] * (10 - people)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("people", "others", "expected"),
    [(1, 0, 1.0), (1, 1, 0.5), (2, 0, 1.0), (1, 2, 1 / 3), (2, 3, 2 / 3), (3, 2, 1.0), (4, 7, 1.0), (0, 2, 0.0)],
)
def test_of_other_numbers_three_are_enough_or_all(people, others, expected):
    assert vqa_accuracy("net", ["net"] * people + ["mesh"] * others) == pytest.approx(expected)


def test_no_answer_is_nobodys():
    assert vqa_accuracy("", [""] * 10) == 0.0
    assert vqa_accuracy("net", []) == 0.0
