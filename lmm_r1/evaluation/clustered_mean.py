"""The mean over all samples of all rows, with a standard error that takes the rows for the independent units."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and how sure it is."""

    mean: float
    standard_error: float | None
    """None for a single row, which says nothing about the spread over rows."""


def clustered_mean(rows: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over the samples of all rows, with its standard error clustered over rows.

    Samples of one row are alike, so they add less than as many rows would: the squared sums of each row's deviations are
    added up (Miller 2024, arXiv 2411.00640), times R / (R - 1) for R rows. With one sample per row, or the
    same number for each, that is the sample standard deviation of the rows' means over the root of R.

    Args:
        rows: the samples of each row; at least one row, and at least one sample in each.
    """
    assert rows, "there is no mean of no rows"
    assert all(rows), "every row needs a sample"
    total = sum(map(len, rows))
    mean = math.fsum(value for row in rows for value in row) / total
    if len(rows) == 1:
        return Estimate(mean=mean, standard_error=None)
    squared = math.fsum(math.fsum(value - mean for value in row) ** 2 for row in rows)
    return Estimate(mean=mean, standard_error=math.sqrt(squared * len(rows) / (len(rows) - 1)) / total)
