"""What a check of rows can find, and the figures of a whole file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.data.preferences import JudgedRow, PreferenceRow, StepRow, UnpairedRow

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


@dataclass(frozen=True, kw_only=True)
class Side:
    """One response to a row's prompt."""

    name: str
    """What it is called: `chosen`."""
    turns: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class JudgedView(Row):
    """A prompt whose responses are judged."""

    judged: JudgedRow
    sides: tuple[Side, ...]
    verdict: str
    """What was said of them: of two rows with the same prompt and sides that differ in it, one is wrong."""

    @property
    def conversations(self) -> list[tuple[str, Row]]:
        """The prompt with each of its responses, and what that is called."""
        return [(side.name, self.judged.conversation(side.turns)) for side in self.sides]


def sides_of(row: Row) -> tuple[Side, ...]:
    """Return the responses of a row, none where they are not judged."""
    return row.sides if isinstance(row, JudgedView) else ()


def views(rows: Mapping[int, JudgedRow]) -> dict[int, Row]:
    """Return rows with judged responses as the checks take them."""
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
    """Return how many there are of what a training on such rows depends on."""
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
