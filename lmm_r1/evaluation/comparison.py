"""The paired comparison of two checkpoints on the same rows: the difference and its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

import numpy as np

from lmm_r1.errors import UserError
from lmm_r1.records.responses import JudgedResponse, by_row

CONFIDENCE = 0.95
BATCH_VALUES = 4_000_000
"""How many resampled values are in memory at a time."""
MAX_OPERATIONS = 5_000_000_000
"""Above this, about ten seconds, the sign test replaces the permutation test."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A checkpoint's accuracy minus the baseline's, by one verifier, on the rows that both answered."""

    baseline: str
    checkpoint: str
    file: str
    verifier: str
    rows: int
    """Rows that both answered."""
    rows_of_one: int
    """Rows that only one of them answered, which are left out."""
    difference: float
    low: float
    """The 95 % interval of the difference, by a percentile bootstrap over rows."""
    high: float
    p_value: float
    test: str
    """The test that gave the p-value."""
    better_rows: int
    """Rows on which the checkpoint's accuracy is above the baseline's."""
    worse_rows: int


def compare(
    baseline: Sequence[JudgedResponse],
    checkpoint: Sequence[JudgedResponse],
    *,
    verifier: str,
    resamples: int,
    seed: int,
) -> Comparison:
    """Return the paired comparison of two checkpoints' responses to one file.

    Raises:
        UserError: they share no row, or a row's label or question differs between them.
    """
    first = {row[0].index: row for row in by_row(baseline)}
    second = {row[0].index: row for row in by_row(checkpoint)}
    shared = [index for index in first if index in second]
    file = baseline[0].file
    if not shared:
        raise UserError(f"{file}: the two evaluations share no row; compare those of the same rows")
    for index in shared:
        _check_same(first[index][0], second[index][0])
    return compare_rows(
        {index: _accuracy(row, verifier=verifier) for index, row in first.items()},
        {index: _accuracy(row, verifier=verifier) for index, row in second.items()},
        baseline=baseline[0].checkpoint,
        checkpoint=checkpoint[0].checkpoint,
        file=file,
        verifier=verifier,
        resamples=resamples,
        seed=seed,
    )


def compare_rows(
    first: Mapping[int, Fraction],
    second: Mapping[int, Fraction],
    *,
    baseline: str,
    checkpoint: str,
    file: str,
    verifier: str,
    resamples: int,
    seed: int,
) -> Comparison:
    """Return the paired comparison of two sets of accuracies by row index, which share at least one row.

    Args:
        baseline: the name of the first set; `checkpoint` is that of the second.
    """
    shared = [index for index in first if index in second]
    differences = [second[index] - first[index] for index in shared]
    values = [float(difference) for difference in differences]
    interval = mean_interval(values, resamples=resamples, seed=seed, confidence=CONFIDENCE)
    test = paired_test(differences)
    return Comparison(
        baseline=baseline,
        checkpoint=checkpoint,
        file=file,
        verifier=verifier,
        rows=len(shared),
        rows_of_one=len(first) + len(second) - 2 * len(shared),
        difference=fmean(values),
        low=interval.low,
        high=interval.high,
        p_value=test.p_value,
        test=test.method,
        better_rows=sum(difference > 0 for difference in differences),
        worse_rows=sum(difference < 0 for difference in differences),
    )


def _accuracy(row: Sequence[JudgedResponse], *, verifier: str) -> Fraction:
    return Fraction(sum(response.verdicts[verifier].right for response in row), len(row))


def _check_same(first: JudgedResponse, second: JudgedResponse) -> None:
    for name in ("label", "question"):
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            raise UserError(
                f"{first.file}: {first.row} and {second.row} are not the same row: their {name}s are {ours[:80]!r} and "
                f"{theirs[:80]!r}; compare evaluations of the same rows"
            )


@dataclass(frozen=True, kw_only=True)
class Interval:
    low: float
    high: float


def mean_interval(values: Sequence[float], *, resamples: int, seed: int, confidence: float) -> Interval:
    """Return the percentile interval of the mean of the rows' values, by resampling rows (Efron 1979).

    For the differences between two checkpoints on the same rows, this is the paired bootstrap.

    Args:
        confidence: the share of the resampled means inside the interval, such as 0.95.
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


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The two-sided p-value of a test."""

    p_value: float
    method: str


def paired_test(differences: Sequence[Fraction]) -> PairedTest:
    """Return the p-value of rows' differences under the hypothesis that each has either sign with equal probability.

    The test of the sum counts all 2^R choices of signs; with one sample per row it is McNemar's exact test. If there are too
    many different sums, it is the sign test.
    """
    moved = [difference for difference in differences if difference]
    scale = math.lcm(*(difference.denominator for difference in moved)) if moved else 1
    steps = [int(abs(difference) * scale) for difference in moved]
    if len(steps) * sum(steps) > MAX_OPERATIONS:
        return PairedTest(p_value=sign_test(moved), method="sign test")
    observed = int(abs(sum(moved, Fraction(0))) * scale)
    return PairedTest(p_value=_share_of_sums(steps, reaching=observed), method="sign-flip permutation test")


def sign_test(differences: Sequence[Fraction]) -> float:
    """Return the exact two-sided p-value of how many differences are above zero, ignoring those that are zero."""
    from scipy.stats import binomtest

    above, count = sum(difference > 0 for difference in differences), sum(map(bool, differences))
    return float(binomtest(above, count).pvalue) if count else 1.0


def _share_of_sums(steps: Sequence[int], *, reaching: int) -> float:
    """Return the share, over all choices of signs, of sums of the steps whose absolute value is at least `reaching`."""
    if reaching == 0:
        return 1.0
    # The sum of the signed steps is 2 * (the sum of the positive ones) - total.
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


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """One row with different verdicts; accuracies are between 0 and 1."""

    file: str
    verifier: str
    row: str
    """The row's file and line."""
    key: str
    """The harness's name for the row."""
    question: str
    options: Mapping[str, str]
    label: str
    predictions: tuple[str, ...]
    theirs: float
    ours: float
    images: tuple[str, ...]
    """Paths, URLs and data URIs."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One verifier compared with the verdicts in a file of predictions, on the rows that have one."""

    comparison: Comparison
    """Its baseline is the file's own verdict."""
    theirs: float
    """Mean of the file's verdicts."""
    ours: float
    """Mean of the verifier's."""


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """A file of predictions that was judged again."""

    file: str
    harness: str
    metric: str
    """The file's own verdict."""
    agreements: tuple[Agreement, ...]
    """One per verifier."""
    disagreements: tuple[Disagreement, ...]
    """For the first verifier, in the order of the file."""
