"""The kinds of findings, and the statistics of a whole file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.data.preferences import JudgedRow, PreferenceRow, StepRow, UnpairedRow

KINDS = {
    "row": "cannot be used: training stops at such a row",
    "image": "has an image or a video that cannot be read",
    "answer": "has no answer, and is not a conversation to train on",
    "length": "is longer than the training's budget",
    "encoding": "cannot be encoded for the model",
    "special tokens": "writes special tokens as text, which do not act as a turn or an end",
    "gold refused": "has an answer that a verifier cannot judge by",
    "gold wrong": "has an answer that a verifier does not accept",
    "leak": "is also in another file",
    "duplicate": "repeats an earlier row",
    "contradiction": "repeats an earlier row with another answer",
}
"""The kinds of findings in the order in which they are reported, each with a predicate for its rows."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem with one row."""

    kind: str
    """One of `KINDS`."""
    index: int
    """The row's index in the file, from 0."""
    location: str
    """File and line."""
    what: str

    def __post_init__(self) -> None:
        """An unknown kind would not be reported."""
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The values from `low` up to `high`; only the last bin includes `high`."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a number is distributed over the rows or the images."""

    name: str
    count: int
    least: float
    median: float
    most_of_90: float
    """90 % of the values are at most this."""
    most_of_99: float
    largest: float
    bins: tuple[Bin, ...]
    limit: float | None = None
    """Values should not exceed it."""

    @classmethod
    def of(cls, name: str, values: Sequence[float], *, bins: int = 24, limit: float | None = None) -> Distribution:
        """Return the distribution of one or more values; a quantile is the smallest value with that share at or below it."""
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


@dataclass(frozen=True, kw_only=True)
class Side:
    """One response to a row's prompt."""

    name: str
    """Such as `chosen`."""
    turns: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class JudgedView(Row):
    """A prompt with judged responses."""

    judged: JudgedRow
    sides: tuple[Side, ...]
    verdict: str
    """The judgement of the responses; if two rows differ in it alone, one of them is wrong."""

    @property
    def conversations(self) -> list[tuple[str, Row]]:
        """The name of each response, and the prompt followed by it."""
        return [(side.name, self.judged.conversation(side.turns)) for side in self.sides]


def sides_of(row: Row) -> tuple[Side, ...]:
    """Return the responses of a row with judged responses, none for other rows."""
    return row.sides if isinstance(row, JudgedView) else ()


def views(rows: Mapping[int, JudgedRow]) -> dict[int, Row]:
    """Return rows with judged responses in the form that the checks need."""
    return {index: _view(row) for index, row in rows.items()}


def _view(row: JudgedRow) -> JudgedView:
    sides: tuple[Side, ...]
    if isinstance(row, PreferenceRow):
        sides = (Side(name="chosen", turns=row.chosen), Side(name="rejected", turns=row.rejected))
        verdict = _text(row.chosen)
    elif isinstance(row, UnpairedRow):
        verdict = "desirable" if row.desirable else "undesirable"
        sides = (Side(name="response", turns=row.response),)
    else:
        assert isinstance(row, StepRow), type(row)
        verdict = ", ".join(f"{label:g}" for label in row.labels)
        sides = (Side(name="steps", turns=(Message(role="assistant", parts=(TextPart("\n".join(row.steps)),)),)),)
    return JudgedView(
        messages=row.messages,
        answer="",
        datasource=row.datasource,
        location=row.location,
        plain=row.plain,
        judged=row,
        sides=sides,
        verdict=verdict,
    )


def _text(turns: Sequence[Message]) -> str:
    return " ".join(part.text for turn in turns for part in turn.parts if isinstance(part, TextPart))


def counts(rows: Mapping[int, JudgedRow]) -> dict[str, int]:
    """Return the numbers that a training on such rows depends on."""
    tally: Counter[str] = Counter()
    for row in rows.values():
        for phrase, count in _tally(row).items():
            tally[phrase] += count
    return dict(tally)


def _tally(row: JudgedRow) -> dict[str, int]:
    if isinstance(row, PreferenceRow):
        return {"pairs": 1, "pairs with a margin": row.margin is not None}
    if isinstance(row, UnpairedRow):
        return {"desirable responses": row.desirable, "undesirable responses": not row.desirable}
    assert isinstance(row, StepRow), type(row)
    return {"steps": len(row.labels), "wrong steps": sum(label < 0.5 for label in row.labels)}
