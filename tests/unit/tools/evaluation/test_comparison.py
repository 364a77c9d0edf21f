import itertools
from fractions import Fraction

import pytest
from helpers.run_folders import judged_rows

from lmm_r1.errors import UserError
from lmm_r1.records.responses import JudgedResponse
from lmm_r1.tools.evaluation.board import Comparison, compare, mean_interval, paired_test


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


def test_rows_that_are_not_the_same_are_refused():
    with pytest.raises(UserError, match=r"rows.jsonl line 1 and rows.jsonl line 1 are not the same row: their labels"):
        compared(judged_rows([[True]]), judged_rows([[True]], label="7"))
    with pytest.raises(UserError, match="held_out: the two evaluations share no row"):
        compared(judged_rows([[True]]), judged_rows([[True]], index=5))


def interval(values: list[float], **changes) -> tuple[float, float]:
    return mean_interval(values, **({"resamples": 10_000, "seed": 0} | changes))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        # The resampled mean is Binomial(10, 1/2) / 10: at most 1 with 1.1 %, at most 2 with 5.5 %, and symmetric.
        ([1.0] * 5 + [0.0] * 5, 0.2, 0.8),
        # Binomial(10, 1/10) / 10: 0 with 34.9 %, at most 2 with 93.0 %, at most 3 with 98.7 %.
        ([1.0] + [0.0] * 9, 0.0, 0.3),
        # The same with -1 for 0: 2 * X / 10 - 1.
        ([1.0] + [-1.0] * 9, -1.0, -0.4),
    ],
)
def test_two_values_have_the_quantiles_of_a_binomial(values, low, high, seed):
    found = interval(values, seed=seed)
    assert found == (pytest.approx(low), pytest.approx(high))


def test_the_seed_decides_and_batches_change_nothing(monkeypatch):
    values = [0.1, 0.7, 0.2, 0.9, 0.4, 0.3]
    assert interval(values, resamples=50, seed=3) == interval(values, resamples=50, seed=3)
    assert interval(values, resamples=50, seed=3) != interval(values, resamples=50, seed=4)
    whole = interval(values, resamples=50)
    monkeypatch.setattr("lmm_r1.tools.evaluation.board.BATCH_VALUES", 40)
    batched = interval(values, resamples=50)
    assert batched == pytest.approx(whole)


HALF = Fraction(1, 2)


def test_rows_weigh_by_their_difference():
    # |±1 ±1/2 ±1/2| is 2, 1, 1 or 0, and the sum is 1: three of four ways reach it.
    assert paired_test([Fraction(1), HALF, -HALF]) == 0.75


def test_one_sample_per_row_is_mcnemars_exact_test():
    differences = [Fraction(1)] * 9 + [Fraction(-1)] + [Fraction(0)] * 100
    # At most one of ten on either side: 2 * (1 + 10) / 1024.
    assert paired_test(differences) == pytest.approx(22 / 1024)


def test_no_difference_is_no_evidence():
    assert paired_test([Fraction(0)] * 5) == 1.0
    assert paired_test([Fraction(1), Fraction(-1)]) == 1.0


def test_it_counts_what_going_through_all_signs_counts():
    differences = [Fraction(3, 4), -HALF, Fraction(1, 3), Fraction(1), Fraction(1, 4), Fraction(2, 3), Fraction(-1, 4)]
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * abs(difference) for sign, difference in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    expected = sum(total >= observed for total in sums) / len(sums)
    assert paired_test(differences) == pytest.approx(expected)
