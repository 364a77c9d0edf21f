"""Two checkpoints on the same rows: how far apart they are, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

from lmm_r1.errors import UserError
from lmm_r1.evaluation.bootstrap import mean_interval
from lmm_r1.evaluation.permutation import paired_test
from lmm_r1.records.responses import JudgedResponse, by_row

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A checkpoint less the baseline, in accuracy by one verifier, on the rows that both answered."""

    baseline: str
    checkpoint: str
    file: str
    verifier: str
    rows: int
    """Rows that both answered."""
    rows_of_one: int
    """Rows that only one of them answered; they are left out."""
    difference: float
    low: float
    """The 95 % interval of the difference, by a percentile bootstrap over rows."""
    high: float
    p_value: float
    test: str
    """How the p-value was had."""
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
        UserError: they share no row, or the label of a row is not the same in both.
    """
    first = {row[0].index: row for row in by_row(baseline)}
    second = {row[0].index: row for row in by_row(checkpoint)}
    shared = [index for index in first if index in second]
    file = baseline[0].file
    if not shared:
        raise UserError(f"{file}: the two evaluations share no row; compare those of the same rows")
    for index in shared:
        _check_same(first[index][0], second[index][0])
    differences = [
        _accuracy(second[index], verifier=verifier) - _accuracy(first[index], verifier=verifier) for index in shared
    ]
    values = [float(difference) for difference in differences]
    interval = mean_interval(values, resamples=resamples, seed=seed, confidence=CONFIDENCE)
    test = paired_test(differences)
    return Comparison(
        baseline=baseline[0].checkpoint,
        checkpoint=checkpoint[0].checkpoint,
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
