"""What a check of rows can find, and the figures of a whole file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {
    "row": "cannot be used: training ends at such a row",
    "image": "has an image or a video that cannot be read",
    "answer": "has no answer, and is no conversation to learn from",
    "length": "is longer than the training's budget",
    "encoding": "cannot be encoded for the model",
    "special tokens": "spells special tokens, which are read as text: a turn or an end that was meant is none",
    "gold refused": "has an answer that a verifier cannot judge by",
    "gold wrong": "has an answer that a verifier does not take for right",
    "leak": "is in another file, too",
    "duplicate": "has been there before",
    "contradiction": "has been there before, with another answer",
}
"""The kinds of findings, in the order in which they are told, and what a row of each does."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with one row."""

    kind: str
    """One of `KINDS`."""
    index: int
    """The row's place in the file, from 0."""
    location: str
    """File and line."""
    what: str

    def __post_init__(self) -> None:
        """A kind that nobody tells would be lost."""
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The values from `low` up to `high`; in the last bin, that one included."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How some number is spread over the rows, or over the images."""

    name: str
    count: int
    least: float
    median: float
    most_of_90: float
    """Nine of ten values are no larger."""
    most_of_99: float
    largest: float
    bins: tuple[Bin, ...]
    limit: float | None = None
    """What values should not exceed."""

    @classmethod
    def of(cls, name: str, values: Sequence[float], *, bins: int = 24, limit: float | None = None) -> Distribution:
        """Return that of one or more values; a quantile is the smallest value that so large a share does not exceed."""
        ordered = sorted(values)

        def quantile(share: float) -> float:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return cls(
            name=name,
            count=len(ordered),
            least=ordered[0],
            median=quantile(0.5),
            most_of_90=quantile(0.9),
            most_of_99=quantile(0.99),
            largest=ordered[-1],
            bins=_bins(ordered, count=bins),
            limit=limit,
        )


def _bins(ordered: Sequence[float], *, count: int) -> tuple[Bin, ...]:
    low, high = ordered[0], ordered[-1]
    width = (high - low) / count
    if not width:
        return (Bin(low=low, high=high, count=len(ordered)),)
    counts = [0] * count
    for value in ordered:
        counts[min(count - 1, int((value - low) / width))] += 1
    return tuple(
        Bin(low=low + index * width, high=low + (index + 1) * width, count=found) for index, found in enumerate(counts)
    )
