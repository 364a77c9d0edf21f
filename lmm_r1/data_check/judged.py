"""Rows with judged responses as the checks take them: a prompt, the responses beside it, and what was said of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.data.preferences import JudgedRow, PreferenceRow, StepRow, UnpairedRow


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
