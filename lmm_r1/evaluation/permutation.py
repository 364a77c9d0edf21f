"""Exact tests of paired differences: how likely chance alone makes one of two equal checkpoints look so much better."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MAX_OPERATIONS = 5_000_000_000
"""Beyond that, about ten seconds, the signs alone are tested."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The two-sided p-value of a test."""

    p_value: float
    method: str


def paired_test(differences: Sequence[Fraction]) -> PairedTest:
    """Return the p-value of rows' differences under the hypothesis that each might as well have the other sign.

    The test of the sum, by counting all 2^R ways to choose the signs; with one sample per row it is McNemar's exact test.
    Where the differences are of too many kinds for that, it is the sign test.
    """
    moved = [difference for difference in differences if difference]
    scale = math.lcm(*(difference.denominator for difference in moved)) if moved else 1
    steps = [int(abs(difference) * scale) for difference in moved]
    if len(steps) * sum(steps) > MAX_OPERATIONS:
        return PairedTest(p_value=sign_test(moved), method="sign test")
    observed = int(abs(sum(moved, Fraction(0))) * scale)
    return PairedTest(p_value=_share_of_sums(steps, reaching=observed), method="sign-flip permutation test")


def sign_test(differences: Sequence[Fraction]) -> float:
    """Return the exact two-sided p-value of how many differences are above zero; those that are zero do not count."""
    from scipy.stats import binomtest

    above, count = sum(difference > 0 for difference in differences), sum(map(bool, differences))
    return float(binomtest(above, count).pvalue) if count else 1.0


def _share_of_sums(steps: Sequence[int], *, reaching: int) -> float:
    """The share, over all choices of signs, of sums of the steps whose size is `reaching` or more."""
    if reaching == 0:
        return 1.0
    # The sum of the signed steps is 2 * (the sum of those with a plus) - total.
    total = sum(steps)
    chances = np.zeros(total + 1)
    chances[0] = 1.0
    reached = 0
    for step in steps:
        chances[step : reached + step + 1] = (chances[step : reached + step + 1] + chances[: reached + 1]) / 2
        chances[:step] /= 2
        reached += step
    sums = 2 * np.arange(total + 1) - total
    return min(1.0, float(chances[np.abs(sums) >= reaching].sum()))
