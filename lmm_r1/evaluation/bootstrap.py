"""Percentile bootstrap over rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BATCH_VALUES = 4_000_000
"""How many resampled values are held at a time."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    low: float
    high: float


def mean_interval(values: Sequence[float], *, resamples: int, seed: int, confidence: float) -> Interval:
    """Return the percentile interval of the mean of the rows' values, by resampling rows (Efron 1979).

    Of the differences between two checkpoints on the same rows, that is the paired bootstrap.

    Args:
        confidence: the share of the resampled means inside the interval, 0.95 say.
    """
    rows = np.asarray(values, dtype=np.float64)  # (R,)
    generator = np.random.default_rng(seed)
    batch = max(1, BATCH_VALUES // len(rows))
    means = [
        rows[generator.integers(len(rows), size=(min(batch, resamples - start), len(rows)))].mean(axis=1)
        for start in range(0, resamples, batch)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(low=float(low), high=float(high))
