"""Which rows a page shows with their responses: those that tell the checkpoints apart come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lmm_r1.evaluation.scoreboard.board import Board, MeasuredFile
from lmm_r1.records.responses import JudgedResponse, by_row

MAX_ROWS = 24
MAX_SAMPLES = 4
MAX_CHARS = 3000


@dataclass(frozen=True, kw_only=True)
class ShownResponse:
    text: str
    right: bool
    truncated: bool
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ShownAnswers:
    """What one checkpoint made of a row."""

    checkpoint: str
    right: int
    samples: int
    responses: tuple[ShownResponse, ...]
    """The first of them."""


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    place: str
    question: str
    label: str
    answers: tuple[ShownAnswers, ...]


def shown_rows(board: Board, file: MeasuredFile) -> list[ShownRow]:
    """Return up to `MAX_ROWS` rows, those on which the checkpoints differ most first, then in the order of the file."""
    answered: dict[int, dict[str, list[JudgedResponse]]] = {}
    for checkpoint in board.checkpoints:
        for row in by_row(checkpoint.files.get(file.name, ())):
            answered.setdefault(row[0].index, {})[checkpoint.name] = row

    def spread(index: int) -> float:
        means = [fmean(_right(response, file) for response in row) for row in answered[index].values()]
        return max(means) - min(means)

    chosen = sorted(answered, key=lambda index: (-spread(index), index))[:MAX_ROWS]
    return [_shown(answered[index], file=file) for index in chosen]


def _shown(rows: dict[str, list[JudgedResponse]], *, file: MeasuredFile) -> ShownRow:
    first = next(iter(rows.values()))[0]
    return ShownRow(
        place=first.row,
        question=_clipped(first.question),
        label=first.label,
        answers=tuple(_answers(name, row, file=file) for name, row in rows.items()),
    )


def _answers(name: str, row: Sequence[JudgedResponse], *, file: MeasuredFile) -> ShownAnswers:
    return ShownAnswers(
        checkpoint=name,
        right=sum(_right(response, file) for response in row),
        samples=len(row),
        responses=tuple(
            ShownResponse(
                text=_clipped(response.response),
                right=_right(response, file),
                truncated=response.truncated,
                tokens=response.response_tokens,
            )
            for response in row[:MAX_SAMPLES]
        ),
    )


def _right(response: JudgedResponse, file: MeasuredFile) -> bool:
    return response.verdicts[file.verifier].right


def _clipped(text: str) -> str:
    """The text without its middle where it is long: the answer stands at the end."""
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"
