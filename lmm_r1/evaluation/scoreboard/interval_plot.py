"""Where a difference and its interval lie on an axis that all comparisons on a file share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.evaluation.comparison import Comparison

WIDTH = 200.0
SMALLEST_REACH = 0.01
"""An axis reaches at least one percentage point to either side."""


@dataclass(frozen=True, kw_only=True)
class IntervalMark:
    """Places on an axis from 0 to `WIDTH` whose middle is no difference."""

    low: float
    high: float
    dot: float
    verdict: str
    """`up` or `down` where the interval holds no zero, else `even`."""


def reach_of(comparisons: Sequence[Comparison]) -> float:
    """Return how far an axis must reach on either side of zero to hold all of them."""
    sizes = [abs(value) for comparison in comparisons for value in (comparison.low, comparison.high)]
    return max([*sizes, SMALLEST_REACH])


def interval_mark(comparison: Comparison, *, reach: float) -> IntervalMark:
    """Return where to draw a comparison on an axis from -reach to reach."""

    def place(value: float) -> float:
        return round(WIDTH * (value / reach + 1) / 2, 1)

    verdict = "up" if comparison.low > 0 else "down" if comparison.high < 0 else "even"
    return IntervalMark(
        low=place(comparison.low), high=place(comparison.high), dot=place(comparison.difference), verdict=verdict
    )
