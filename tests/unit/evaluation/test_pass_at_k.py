import math
from fractions import Fraction

import pytest

from lmm_r1.evaluation.pass_at_k import mean_pass_at_k, pass_at_k, powers_of_two

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [
        (5, 2, 2, Fraction(7, 10)),  # 1 - 3/10
        (10, 3, 4, Fraction(5, 6)),  # 1 - 35/210
        (8, 3, 1, Fraction(3, 8)),
        (8, 0, 8, Fraction(0)),
        (8, 1, 8, Fraction(1)),
        (4, 3, 2, Fraction(1)),
    ],
)
def test_it_is_the_share_of_subsets_with_a_right_sample(samples, right, k, expected):
    assert expected == 1 - Fraction(math.comb(samples - right, k), math.comb(samples, k))
    assert pass_at_k(samples=samples, right=right, k=k) == pytest.approx(float(expected), abs=1e-15)


def test_binomials_beyond_any_float_are_no_trouble():
    assert pass_at_k(samples=10_000, right=1, k=5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 2)])
def test_what_cannot_be_told_is_refused(samples, right, k):
    with pytest.raises(ValueError, match=f"pass@{k} cannot be told from {samples} samples of which {right}"):
        pass_at_k(samples=samples, right=right, k=k)


def test_the_mean_is_over_rows():
    verdicts = [[True, True, False, False, False], [False] * 5]
    estimate = mean_pass_at_k(verdicts, k=2)
    assert estimate.mean == pytest.approx(0.35)
    # The rows have 0.7 and 0: half their distance.
    assert estimate.standard_error == pytest.approx(0.35)


def test_powers_of_two_end_at_the_limit():
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(12) == [1, 2, 4, 8]
