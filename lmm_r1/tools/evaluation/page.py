"""An evaluation as one self-contained HTML page, without scripts or external files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

from lmm_r1.data.messages import ImagePart, VideoPart, describe_video
from lmm_r1.errors import UserError
from lmm_r1.records.responses import JudgedResponse, ShownTurn, by_row
from lmm_r1.tools.evaluation.board import (
    CONFIDENCE_TEXT,
    Board,
    Comparison,
    MeasuredFile,
    columns,
    count,
    episode_columns,
    estimate,
    interval,
    p_value,
    share,
)
from lmm_r1.tools.evaluation.page_parts import ImageError, data_uri, image_uri, mean, page_templates, points_text
from lmm_r1.tools.evaluation.scores import SampleScores

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


def shown_rows(board: Board, file: MeasuredFile) -> list[dict[str, list[JudgedResponse]]]:
    """Return the responses of each checkpoint to up to `MAX_ROWS` rows.

    They begin with the rows on which the checkpoints differ most; others are in the order of the file.
    """
    answered: dict[int, dict[str, list[JudgedResponse]]] = {}
    for checkpoint in board.checkpoints:
        for row in by_row(checkpoint.files.get(file.name, ())):
            answered.setdefault(row[0].index, {})[checkpoint.name] = row

    def spread(index: int) -> float:
        means = [fmean(is_right(response, file) for response in row) for row in answered[index].values()]
        return max(means) - min(means)

    return [answered[index] for index in sorted(answered, key=lambda index: (-spread(index), index))[:MAX_ROWS]]


class PagePictures:
    """Pictures as data URIs, up to the number that a page can hold."""

    def __init__(self) -> None:
        self._left = MAX_PICTURES

    def of_row(self, first: JudgedResponse, file: MeasuredFile) -> list[ShownPart]:
        """Return the images of the row of a response, or why they cannot be shown."""
        row = file.rows.get(first.index)
        if row is None:
            what = "Its image is" if first.images == 1 else f"Its {first.images} images are"
            missing = ShownPart(text=f"{what} not available: the file of the row has moved or changed.")
            return [missing] if first.images else []
        shown = []
        for part in (part for message in row.messages for part in message.parts):
            if isinstance(part, ImagePart):
                found = self._uri(partial(image_uri, part.source, location=row.location))
                # A self-contained page loads nothing from the network.
                is_embedded = found.picture.startswith("data:")
                shown.append(found if is_embedded else ShownPart(text=found.picture or found.text))
            elif isinstance(part, VideoPart):
                described = describe_video(part)
                frames = described if isinstance(described, str) else f"{len(described)} frames"
                shown.append(ShownPart(text=f"Video: {frames}"))
        return shown

    def of_turn(self, turn: ShownTurn) -> list[ShownPart]:
        """Return the texts and pictures of a turn of an episode; a picture that is not shown keeps its mark."""
        texts = turn.text.split(PICTURE_MARK, len(turn.images))
        parts = [ShownPart(text=clipped(texts[0]))]
        for path, text in zip(turn.images, texts[1:], strict=False):
            uri = self._uri(partial(_file_uri, path)).picture
            parts += [ShownPart(picture=uri) if uri else ShownPart(text=PICTURE_MARK), ShownPart(text=clipped(text))]
        return [part for part in parts if part.text.strip() or part.picture]

    def _uri(self, make: Callable[[], str]) -> ShownPart:
        if not self._left:
            return ShownPart(text="This page has no room for more images.")
        try:
            picture = make()
        except (OSError, ImageError, UserError) as error:
            return ShownPart(text=str(error))
        self._left -= 1
        return ShownPart(picture=picture)


def _file_uri(path: str) -> str:
    return data_uri(Path(path).read_bytes())


def course(response: JudgedResponse) -> str:
    """Return how the episode of a response went: `3 turns, over, tool calls 2`; empty without one."""
    episode = response.episode
    if episode is None:
        return ""
    end = "over" if episode.end == "over" else f"out of {episode.end}"
    numbers = [f"{name.replace('_', ' ')} {value:g}" for name, value in {**episode.counts, **episode.rewards}.items()]
    return ", ".join([f"{episode.turns} {'turn' if episode.turns == 1 else 'turns'}", end, *numbers])


def is_right(response: JudgedResponse, file: MeasuredFile) -> bool:
    """Return whether a response is right by the first verifier of its file."""
    return response.verdicts[file.verifier].right


def clipped(text: str) -> str:
    """Return a long text without its middle, because the answer is at the end."""
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"


FILTERS: dict[str, Callable[..., object]] = {
    "change": points_text,
    **{
        show.__name__: show
        for show in (share, count, mean, estimate, interval, p_value, clipped, text_parts, course, is_right)
    },
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
class FileView:
    file: MeasuredFile
    groups: list[RowGroup]
    notes: list[str]
    comparisons: list[Comparison]
    reach: float
    """How far the axis of the comparisons extends on each side of zero."""
    shown: list[dict[str, list[JudgedResponse]]]


def build_page(board: Board, *, written_at: datetime | None = None) -> str:
    """Return the page of an evaluation as HTML."""
    return (
        page_templates(Path(__file__).parent, filters=FILTERS)
        .get_template("scoreboard.html.j2")
        .render(
            board=board,
            views=[_view(board, file) for file in board.files],
            pictures=PagePictures(),
            width=WIDTH,
            max_skipped=MAX_SKIPPED,
            max_samples=MAX_SAMPLES,
            confidence=CONFIDENCE_TEXT,
            settings={name: board.settings[name] for name in PAGE_SETTINGS if board.settings.get(name) is not None},
            written_at=written_at or datetime.now(tz=timezone.utc),
        )
    )


def _view(board: Board, file: MeasuredFile) -> FileView:
    comparisons = [comparison for comparison in board.comparisons if comparison.file == file.name]
    groups = [
        RowGroup(
            title="All rows" if source is None else source,
            rows=max(found.rows for found in scores.values()),
            scores=scores,
            best=board.best(scores, verifier=file.verifier),
            played={name: told for name, found in scores.items() if (told := episode_columns(found))},
        )
        for source, scores in board.groups(file)
    ]
    return FileView(
        file=file,
        groups=groups,
        notes=list(_notes(board, file)),
        comparisons=comparisons,
        # The axis extends equally far on both sides of zero, and holds all comparisons.
        reach=max([SMALLEST_REACH, *(abs(end) for one in comparisons for end in (one.low, one.high))]),
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
