"""The rows that a page of an evaluation shows, with what checkpoints made of them: single responses, or whole episodes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import PIL.Image

from lmm_r1.evaluation.scoreboard.board import Board, MeasuredFile
from lmm_r1.records.responses import JudgedResponse, ShownTurn, by_row

MAX_ROWS = 24
MAX_SAMPLES = 4
MAX_CHARS = 3000
MAX_PICTURES = 400
PICTURE_MARK = "<image>"


@dataclass(frozen=True, kw_only=True)
class ShownPart:
    """A stretch of a turn: text, or a picture as a data URI."""

    text: str = ""
    picture: str = ""


@dataclass(frozen=True, kw_only=True)
class ShownSaid:
    """A turn of an episode."""

    role: str
    parts: tuple[ShownPart, ...]


@dataclass(frozen=True, kw_only=True)
class ShownResponse:
    text: str
    right: bool
    truncated: bool
    tokens: int | None
    said: tuple[ShownSaid, ...] = ()
    """Of an episode, its turns."""
    told: str = ""
    """How it went: `3 turns, over, tool calls 2`."""


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
    pictures = _Pictures()
    return [_shown(answered[index], file=file, pictures=pictures) for index in chosen]


def _shown(rows: dict[str, list[JudgedResponse]], *, file: MeasuredFile, pictures: _Pictures) -> ShownRow:
    first = next(iter(rows.values()))[0]
    return ShownRow(
        place=first.row,
        question=clipped(first.question),
        label=first.label,
        answers=tuple(_answers(name, row, file=file, pictures=pictures) for name, row in rows.items()),
    )


def _answers(name: str, row: Sequence[JudgedResponse], *, file: MeasuredFile, pictures: _Pictures) -> ShownAnswers:
    return ShownAnswers(
        checkpoint=name,
        right=sum(_right(response, file) for response in row),
        samples=len(row),
        responses=tuple(
            ShownResponse(
                text=clipped(response.response),
                right=_right(response, file),
                truncated=bool(response.truncated),
                tokens=response.response_tokens,
                said=_said(response, pictures=pictures),
                told=_told(response),
            )
            for response in row[:MAX_SAMPLES]
        ),
    )


class _Pictures:
    """Pictures as data URIs, so that the page stands alone; as many of them as a page can hold."""

    def __init__(self) -> None:
        self._left = MAX_PICTURES

    def uri(self, path: str) -> str:
        """Return a picture, empty where it is gone or there are too many."""
        try:
            data = Path(path).read_bytes() if self._left else b""
            with PIL.Image.open(io.BytesIO(data)) as image:
                kind = PIL.Image.MIME[str(image.format)]
        except (OSError, KeyError, PIL.Image.DecompressionBombError):
            return ""
        self._left -= 1
        return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _said(response: JudgedResponse, *, pictures: _Pictures) -> tuple[ShownSaid, ...]:
    if response.episode is None:
        return ()
    return tuple(ShownSaid(role=turn.role, parts=_parts(turn, pictures=pictures)) for turn in response.episode.said)


def _parts(turn: ShownTurn, *, pictures: _Pictures) -> tuple[ShownPart, ...]:
    texts = turn.text.split(PICTURE_MARK, len(turn.images))
    parts = [ShownPart(text=clipped(texts[0]))]
    for path, text in zip(turn.images, texts[1:], strict=False):
        uri = pictures.uri(path)
        # What is not shown keeps its mark.
        parts += [ShownPart(picture=uri) if uri else ShownPart(text=PICTURE_MARK), ShownPart(text=clipped(text))]
    return tuple(part for part in parts if part.text.strip() or part.picture)


def _told(response: JudgedResponse) -> str:
    episode = response.episode
    if episode is None:
        return ""
    end = "over" if episode.end == "over" else f"ended by the limit of {episode.end}"
    numbers = [f"{name.replace('_', ' ')} {value:g}" for name, value in {**episode.counts, **episode.rewards}.items()]
    return ", ".join([f"{episode.turns} {'turn' if episode.turns == 1 else 'turns'}", end, *numbers])


def _right(response: JudgedResponse, file: MeasuredFile) -> bool:
    return response.verdicts[file.verifier].right


def clipped(text: str) -> str:
    """Return the text without its middle where it is long: the answer stands at the end."""
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"
