"""An evaluation as one self-contained HTML page, without scripts or external files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Literal

from lmm_r1.data.messages import ImagePart, Row, VideoPart, describe_video
from lmm_r1.errors import UserError
from lmm_r1.evaluation.board import Board, Comparison, MeasuredFile
from lmm_r1.evaluation.page_parts import ImageError, data_uri, image_uri, mean, page_templates, points_text
from lmm_r1.evaluation.scores import SampleScores
from lmm_r1.evaluation.terminal import (
    CONFIDENCE_TEXT,
    columns,
    count,
    episode_columns,
    estimate,
    interval,
    p_value,
    share,
)
from lmm_r1.records.responses import JudgedResponse, ShownTurn, by_row

_PART = re.compile(r"(<(think|answer)>)(.*?)(</\2>|\Z)", re.DOTALL)
_THOUGHT_ENDS = "</think>"


@dataclass(frozen=True, kw_only=True)
class ResponsePart:
    kind: Literal["think", "answer", "other"]
    opening: str
    text: str
    closing: str


def text_parts(text: str) -> list[ResponsePart]:
    """Return the parts of a response, which together make up the response.

    If a chat template has already opened the thought, the response starts inside it.
    """
    head, ends, rest = text.partition(_THOUGHT_ENDS)
    parts = []
    if ends and "<think>" not in head and "<answer>" not in head:
        parts.append(ResponsePart(kind="think", opening="", text=head, closing=ends))
        text = rest
    place = 0
    for found in _PART.finditer(text):
        parts.append(ResponsePart(kind="other", opening="", text=text[place : found.start()], closing=""))
        opening, name, inside, closing = found.groups()
        kind: Literal["think", "answer"] = "think" if name == "think" else "answer"
        parts.append(ResponsePart(kind=kind, opening=opening, text=inside, closing=closing))
        place = found.end()
    parts.append(ResponsePart(kind="other", opening="", text=text[place:], closing=""))
    return [part for part in parts if part.kind != "other" or part.text]


MAX_ROWS = 24
MAX_SAMPLES = 4
MAX_CHARS = 3000
MAX_PICTURES = 400
PICTURE_MARK = "<image>"


@dataclass(frozen=True, kw_only=True)
class ShownPart:
    text: str = ""
    picture: str = ""


@dataclass(frozen=True, kw_only=True)
class ShownSaid:
    role: str
    parts: tuple[ShownPart, ...]


@dataclass(frozen=True, kw_only=True)
class ShownResponse:
    parts: tuple[ResponsePart, ...]
    right: bool
    truncated: bool
    tokens: int | None
    said: tuple[ShownSaid, ...] = ()
    told: str = ""
    """How an episode went: `3 turns, over, tool calls 2`."""


@dataclass(frozen=True, kw_only=True)
class ShownAnswers:
    checkpoint: str
    right: int
    samples: int
    responses: tuple[ShownResponse, ...]


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    place: str
    question: str
    label: str
    answers: tuple[ShownAnswers, ...]
    pictures: tuple[ShownPart, ...]
    """Its images, or why they cannot be shown."""


def shown_rows(board: Board, file: MeasuredFile) -> list[ShownRow]:
    """Return up to `MAX_ROWS` rows: first those on which the checkpoints differ most, then in the order of the file."""
    answered: dict[int, dict[str, list[JudgedResponse]]] = {}
    for checkpoint in board.checkpoints:
        for row in by_row(checkpoint.files.get(file.name, ())):
            answered.setdefault(row[0].index, {})[checkpoint.name] = row

    def spread(index: int) -> float:
        means = [fmean(_right(response, file) for response in row) for row in answered[index].values()]
        return max(means) - min(means)

    chosen = sorted(answered, key=lambda index: (-spread(index), index))[:MAX_ROWS]
    pictures = _PagePictures()
    return [_shown(answered[index], file=file, pictures=pictures) for index in chosen]


def _shown(rows: dict[str, list[JudgedResponse]], *, file: MeasuredFile, pictures: _PagePictures) -> ShownRow:
    first = next(iter(rows.values()))[0]
    return ShownRow(
        place=first.row,
        question=clipped(first.question),
        label=first.label,
        answers=tuple(_answers(name, row, file=file, pictures=pictures) for name, row in rows.items()),
        pictures=tuple(_row_pictures(first, row=file.rows.get(first.index), pictures=pictures)),
    )


def _row_pictures(first: JudgedResponse, *, row: Row | None, pictures: _PagePictures) -> list[ShownPart]:
    if row is None:
        count = first.images
        what = "Its image is" if count == 1 else f"Its {count} images are"
        return [ShownPart(text=f"{what} not available: the file of the row has moved or changed.")] if count else []
    parts = [part for message in row.messages for part in message.parts]
    return [
        pictures.of_row(part, location=row.location) if isinstance(part, ImagePart) else _video_part(part)
        for part in parts
        if isinstance(part, ImagePart | VideoPart)
    ]


def _video_part(part: VideoPart) -> ShownPart:
    described = describe_video(part)
    return ShownPart(text=f"Video: {described if isinstance(described, str) else f'{len(described)} frames'}")


def _answers(name: str, row: Sequence[JudgedResponse], *, file: MeasuredFile, pictures: _PagePictures) -> ShownAnswers:
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
                told=_course(response),
            )
            for response in row[:MAX_SAMPLES]
        ),
    )


class _PagePictures:
    """Pictures as data URIs, up to the number that a page can hold."""

    def __init__(self) -> None:
        self._left = MAX_PICTURES

    def of_episode(self, path: str) -> str:
        return self._uri(lambda: data_uri(Path(path).read_bytes())).picture

    def of_row(self, part: ImagePart, *, location: str) -> ShownPart:
        found = self._uri(lambda: image_uri(part.source, location=location))
        # A self-contained page loads nothing from the network.
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


def _said(response: JudgedResponse, *, pictures: _PagePictures) -> tuple[ShownSaid, ...]:
    if response.episode is None:
        return ()
    return tuple(ShownSaid(role=turn.role, parts=_parts(turn, pictures=pictures)) for turn in response.episode.said)


def _parts(turn: ShownTurn, *, pictures: _PagePictures) -> tuple[ShownPart, ...]:
    texts = turn.text.split(PICTURE_MARK, len(turn.images))
    parts = [ShownPart(text=clipped(texts[0]))]
    for path, text in zip(turn.images, texts[1:], strict=False):
        uri = pictures.of_episode(path)
        # A picture that is not shown keeps its mark.
        parts += [ShownPart(picture=uri) if uri else ShownPart(text=PICTURE_MARK), ShownPart(text=clipped(text))]
    return tuple(part for part in parts if part.text.strip() or part.picture)


def _course(response: JudgedResponse) -> str:
    episode = response.episode
    if episode is None:
        return ""
    end = "over" if episode.end == "over" else f"out of {episode.end}"
    numbers = [f"{name.replace('_', ' ')} {value:g}" for name, value in {**episode.counts, **episode.rewards}.items()]
    return ", ".join([f"{episode.turns} {'turn' if episode.turns == 1 else 'turns'}", end, *numbers])


def _right(response: JudgedResponse, file: MeasuredFile) -> bool:
    return response.verdicts[file.verifier].right


def clipped(text: str) -> str:
    """Return a long text without its middle, because the answer is at the end."""
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"


FILTERS: dict[str, Callable[..., str]] = {
    "change": points_text,
    **{show.__name__: show for show in (share, count, mean, estimate, interval, p_value)},
}

MAX_SKIPPED = 20
PAGE_SETTINGS = (
    *("agent", "agent_options", "agent_max_turns", "agent_max_images"),
    *("dtype", "top_p", "seed", "max_model_len", "bootstrap_resamples", "judge_timeout"),
)
"""The settings that a reader needs in addition to those of each file."""
WIDTH = 200.0
SMALLEST_REACH = 0.01
"""An axis reaches at least one percentage point to each side."""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The rows of the table for a whole file, or for one of its data sources."""

    title: str
    rows: int
    scores: dict[str, SampleScores]
    best: set[str]
    played: dict[str, dict[str, str]]

    @property
    def played_columns(self) -> list[str]:
        return columns(self.played.values())

    def most_turns(self, verifier: str) -> int:
        """Return the highest turn limit for which the solved share is known, 0 without episodes."""
        return max(len(self.scores[name].verifiers[verifier].within_turns) for name in self.scores)


@dataclass(frozen=True, kw_only=True)
class IntervalMark:
    """Positions on an axis from 0 to `WIDTH`, whose middle is a difference of zero."""

    low: float
    high: float
    dot: float
    verdict: str


@dataclass(frozen=True, kw_only=True)
class FileView:
    file: MeasuredFile
    anchor: str
    groups: tuple[RowGroup, ...]
    notes: list[str]
    comparisons: tuple[tuple[Comparison, IntervalMark], ...]
    reach: float
    """How far the axis of the comparisons extends on each side of zero."""
    shown: list[ShownRow]


def build_page(board: Board, *, written_at: datetime | None = None) -> str:
    """Return the page of an evaluation as HTML."""
    return (
        page_templates(Path(__file__).parent, filters=FILTERS)
        .get_template("scoreboard.html.j2")
        .render(
            board=board,
            views=[_view(board, file, number=number) for number, file in enumerate(board.files, start=1)],
            width=WIDTH,
            max_skipped=MAX_SKIPPED,
            confidence=CONFIDENCE_TEXT,
            settings={name: board.settings[name] for name in PAGE_SETTINGS if board.settings.get(name) is not None},
            written_at=written_at or datetime.now(tz=timezone.utc),
        )
    )


def _view(board: Board, file: MeasuredFile, *, number: int) -> FileView:
    sources = board.datasources(file)
    comparisons = [comparison for comparison in board.comparisons if comparison.file == file.name]
    # The axis extends equally far on both sides of zero, and holds all comparisons.
    reach = max([SMALLEST_REACH, *(abs(end) for one in comparisons for end in (one.low, one.high))])
    return FileView(
        file=file,
        anchor=f"file-{number}",
        groups=tuple(_groups(board, file, sources=sources)),
        notes=list(_notes(board, file)),
        comparisons=tuple((comparison, interval_mark(comparison, reach=reach)) for comparison in comparisons),
        reach=reach,
        shown=shown_rows(board, file),
    )


def _notes(board: Board, file: MeasuredFile) -> Iterator[str]:
    scores = board.scores(file)
    for verifier in file.verifiers:
        for name, found in scores.items():
            cut_off = found.verifiers[verifier].timed_out
            if cut_off:
                what = "1 response was" if cut_off == 1 else f"{cut_off:,} responses were"
                yield f"{name}: {what} not judged in time by {verifier}; this counts as wrong."
        ungradable = max(found.verifiers[verifier].ungradable_rows for found in scores.values())
        if ungradable:
            what = "1 row" if ungradable == 1 else f"{ungradable:,} rows"
            yield f"{verifier} cannot read the label of {what}, so every answer there counts as wrong."


def _groups(board: Board, file: MeasuredFile, *, sources: Sequence[str]) -> list[RowGroup]:
    groups = []
    for source in [None, *(sources if len(sources) > 1 else ())]:
        scores = board.scores(file, datasource=source)
        groups.append(
            RowGroup(
                title="All rows" if source is None else source,
                rows=max(found.rows for found in scores.values()),
                scores=scores,
                best=board.best(scores, verifier=file.verifier),
                played={name: told for name, found in scores.items() if (told := episode_columns(found))},
            )
        )
    return groups


def interval_mark(comparison: Comparison, *, reach: float) -> IntervalMark:
    """Return where to draw a comparison on an axis from -reach to reach."""

    def place(value: float) -> float:
        return round(WIDTH * (value / reach + 1) / 2, 1)

    verdict = "up" if comparison.low > 0 else "down" if comparison.high < 0 else "even"
    return IntervalMark(
        low=place(comparison.low), high=place(comparison.high), dot=place(comparison.difference), verdict=verdict
    )
