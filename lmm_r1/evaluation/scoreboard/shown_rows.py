"""The rows that a page of an evaluation shows, with what checkpoints made of them: single responses, or whole episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lmm_r1.data.messages import ImagePart, Row, VideoPart, describe_video
from lmm_r1.errors import UserError
from lmm_r1.evaluation.page_images import ImageError, data_uri, image_uri
from lmm_r1.evaluation.scoreboard.board import Board, MeasuredFile
from lmm_r1.evaluation.scoreboard.tagged_text import TextPart, text_parts
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
    parts: tuple[TextPart, ...]
    """The thought and the answer apart."""
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
    pictures: tuple[ShownPart, ...]
    """Its images, or what there is to say of those that cannot be shown."""


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
        pictures=tuple(_row_pictures(first, row=file.rows.get(first.index), pictures=pictures)),
    )


def _row_pictures(first: JudgedResponse, *, row: Row | None, pictures: _Pictures) -> list[ShownPart]:
    if row is None:
        count = first.images
        what = "Its image is" if count == 1 else f"Its {count} images are"
        return [ShownPart(text=f"{what} not at hand: the row is not where it was read.")] if count else []
    parts = [part for message in row.messages for part in message.parts]
    return [
        pictures.of_row(part, location=row.location) if isinstance(part, ImagePart) else _told_video(part)
        for part in parts
        if isinstance(part, ImagePart | VideoPart)
    ]


def _told_video(part: VideoPart) -> ShownPart:
    described = describe_video(part)
    return ShownPart(text=f"Video: {described if isinstance(described, str) else f'{len(described)} frames'}")


def _answers(name: str, row: Sequence[JudgedResponse], *, file: MeasuredFile, pictures: _Pictures) -> ShownAnswers:
    return ShownAnswers(
        checkpoint=name,
        right=sum(_right(response, file) for response in row),
        samples=len(row),
        responses=tuple(
            ShownResponse(
                parts=tuple(text_parts(clipped(response.response))),
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

    def of_episode(self, path: str) -> str:
        """Return a picture in a file, empty where it is gone or there are too many."""
        return self._uri(lambda: data_uri(Path(path).read_bytes())).picture

    def of_row(self, part: ImagePart, *, location: str) -> ShownPart:
        """Return a row's image, or why it is not shown."""
        found = self._uri(lambda: image_uri(part.source, location=location))
        # A page that stands alone asks no other place for anything.
        return found if found.picture.startswith("data:") else ShownPart(text=found.picture or found.text)

    def _uri(self, make: Callable[[], str]) -> ShownPart:
        if not self._left:
            return ShownPart(text="This page has no room for more images.")
        try:
            picture = make()
        except (OSError, ImageError, UserError) as error:
            return ShownPart(text=str(error))
        self._left -= 1
        return ShownPart(picture=picture)


def _said(response: JudgedResponse, *, pictures: _Pictures) -> tuple[ShownSaid, ...]:
    if response.episode is None:
        return ()
    return tuple(ShownSaid(role=turn.role, parts=_parts(turn, pictures=pictures)) for turn in response.episode.said)


def _parts(turn: ShownTurn, *, pictures: _Pictures) -> tuple[ShownPart, ...]:
    texts = turn.text.split(PICTURE_MARK, len(turn.images))
    parts = [ShownPart(text=clipped(texts[0]))]
    for path, text in zip(turn.images, texts[1:], strict=False):
        uri = pictures.of_episode(path)
        # What is not shown keeps its mark.
        parts += [ShownPart(picture=uri) if uri else ShownPart(text=PICTURE_MARK), ShownPart(text=clipped(text))]
    return tuple(part for part in parts if part.text.strip() or part.picture)


def _told(response: JudgedResponse) -> str:
    episode = response.episode
    if episode is None:
        return ""
    end = "over" if episode.end == "over" else f"out of {episode.end}"
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
