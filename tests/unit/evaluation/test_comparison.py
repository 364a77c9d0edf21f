import pytest
from helpers.judged_responses import judged_rows

from lmm_r1.errors import UserError
from lmm_r1.evaluation.comparison import Comparison, compare
from lmm_r1.records.responses import JudgedResponse

pytestmark = pytest.mark.unit


def compared(baseline: list[JudgedResponse], checkpoint: list[JudgedResponse]) -> Comparison:
    return compare(baseline, checkpoint, verifier="math", resamples=10_000, seed=0)


def test_a_checkpoint_against_itself_differs_by_exactly_nothing():
    rows = judged_rows([[True, False], [True, True], [False, False]])
    found = compared(rows, rows)
    assert (found.difference, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert (found.rows, found.better_rows, found.worse_rows) == (3, 0, 0)


def test_the_difference_is_taken_row_by_row():
    baseline = judged_rows([[False]] * 5 + [[True]] * 5)
    better = judged_rows([[True]] * 10, checkpoint="grpo")
    found = compared(baseline, better)
    assert (found.baseline, found.checkpoint, found.file, found.verifier) == ("base", "grpo", "held_out", "math")
    assert found.difference == 0.5
    # Binomial(10, 1/2) / 10; and all five rows that differ are better: 2 / 2^5.
    assert (found.low, found.high) == (pytest.approx(0.2), pytest.approx(0.8))
    assert found.p_value == pytest.approx(2 / 32)
    assert (found.better_rows, found.worse_rows) == (5, 0)


def test_rows_that_only_one_answered_are_left_out_and_counted():
    found = compared(judged_rows([[False], [True], [True]]), judged_rows([[True], [True]]))
    assert (found.rows, found.rows_of_one, found.difference) == (2, 1, 0.5)


def test_samples_may_differ_in_number():
    found = compared(judged_rows([[True, False]]), judged_rows([[True, True, False]]))
    assert found.difference == pytest.approx(1 / 6)


def test_rows_that_are_not_the_same_are_refused():
    with pytest.raises(UserError, match=r"rows.jsonl line 1 and rows.jsonl line 1 are not the same row: their labels"):
        compared(judged_rows([[True]]), judged_rows([[True]], label="7"))
    with pytest.raises(UserError, match="held_out: the two evaluations share no row"):
        compared(judged_rows([[True]]), judged_rows([[True]], index=5))
