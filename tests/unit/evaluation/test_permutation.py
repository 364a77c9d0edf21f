import itertools
from fractions import Fraction

import pytest

from lmm_r1.evaluation.permutation import paired_test, sign_test

pytestmark = pytest.mark.unit

HALF = Fraction(1, 2)


def test_three_rows_that_are_all_better():
    # All plus or all minus, of 8 ways.
    assert paired_test([Fraction(1)] * 3).p_value == 0.25


def test_rows_weigh_by_their_difference():
    # |±1 ±1/2 ±1/2| is 2, 1, 1 or 0, and the sum is 1: three of four ways reach it.
    assert paired_test([Fraction(1), HALF, -HALF]).p_value == 0.75


def test_one_sample_per_row_is_mcnemars_exact_test():
    differences = [Fraction(1)] * 9 + [Fraction(-1)] + [Fraction(0)] * 100
    # At most one of ten on either side: 2 * (1 + 10) / 1024.
    assert paired_test(differences).p_value == pytest.approx(22 / 1024)
    assert sign_test(differences) == pytest.approx(22 / 1024)


def test_no_difference_is_no_evidence():
    assert paired_test([Fraction(0)] * 5).p_value == 1.0
    assert paired_test([Fraction(1), Fraction(-1)]).p_value == 1.0
    assert sign_test([Fraction(0)]) == 1.0


def test_it_counts_what_going_through_all_signs_counts():
    differences = [Fraction(3, 4), -HALF, Fraction(1, 3), Fraction(1), Fraction(1, 4), Fraction(2, 3), Fraction(-1, 4)]
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * abs(difference) for sign, difference in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    expected = sum(total >= observed for total in sums) / len(sums)
    found = paired_test(differences)
    assert (found.p_value, found.method) == (pytest.approx(expected), "sign-flip permutation test")


def test_what_would_take_too_long_is_tested_by_the_signs(monkeypatch):
    monkeypatch.setattr("lmm_r1.evaluation.permutation.MAX_OPERATIONS", 1)
    found = paired_test([Fraction(1), HALF, HALF])
    assert (found.p_value, found.method) == (0.25, "sign test")
