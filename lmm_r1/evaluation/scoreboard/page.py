"""An evaluation as one self-contained HTML page: no script, no network, no file beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean

from lmm_r1.evaluation.comparison import Comparison
from lmm_r1.evaluation.disagreements import Agreement, Disagreement, Rejudged
from lmm_r1.evaluation.page_templates import page_templates
from lmm_r1.evaluation.scoreboard.board import Board, MeasuredFile
from lmm_r1.evaluation.scoreboard.terminal import CONFIDENCE_TEXT, change, count, estimate, interval, p_value, share
from lmm_r1.evaluation.scores import SampleScores
from lmm_r1.records.responses import JudgedResponse, by_row

FILTERS = {show.__name__: show for show in (share, count, estimate, interval, p_value, change)}
MAX_SKIPPED = 20
PAGE_SETTINGS = ("dtype", "top_p", "seed", "max_model_len", "bootstrap_resamples", "judge_timeout")
"""Of the evaluation's settings, those that a reader needs beside what stands with each file."""
WIDTH = 200.0
SMALLEST_REACH = 0.01
"""An axis reaches at least one percentage point to either side."""
MAX_ROWS = 24
MAX_SAMPLES = 4
MAX_CHARS = 3000
MAX_DISAGREEMENTS = 200


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows of the table for a whole file, or for one of its data sources."""

    title: str
    rows: int
    scores: dict[str, SampleScores]
    best: set[str]


@dataclass(frozen=True, kw_only=True)
class IntervalMark:
    """Places on an axis from 0 to `WIDTH` whose middle is no difference."""

    low: float
    high: float
    dot: float
    verdict: str
    """`up` or `down` where the interval holds no zero, else `even`."""


@dataclass(frozen=True, kw_only=True)
class FileView:
    """What the page shows of one file."""

    file: MeasuredFile
    anchor: str
    groups: tuple[Group, ...]
    notes: list[str]
    """What a reader must know of the verdicts."""
    comparisons: tuple[tuple[Comparison, IntervalMark], ...]
    reach: float
    """How far the axis of the comparisons reaches on either side of zero."""
    shown: list[ShownRow]
    rejudged: RejudgedView | None
    """Where the file has the predictions and verdicts of another harness."""


@dataclass(frozen=True, kw_only=True)
class RejudgedView:
    """Our verifiers against a file's own verdicts."""

    rejudged: Rejudged
    agreements: tuple[tuple[Agreement, IntervalMark], ...]
    reach: float
    shown: tuple[Disagreement, ...]
    """The first of them, with clipped texts."""


def build_page(board: Board, *, written_at: datetime | None = None) -> str:
    """Return the page of an evaluation as HTML.

    Args:
        written_at: the moment that the page names as its own; None takes now.
    """
    return (
        page_templates(Path(__file__).parent, filters=FILTERS)
        .get_template("page.html.j2")
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
    reach = reach_of(comparisons)
    return FileView(
        file=file,
        anchor=f"file-{number}",
        groups=tuple(_groups(board, file, sources=sources)),
        notes=list(_notes(board, file)),
        comparisons=tuple((comparison, interval_mark(comparison, reach=reach)) for comparison in comparisons),
        reach=reach,
        shown=shown_rows(board, file),
        rejudged=next((_rejudged(one) for one in board.rejudged if one.file == file.name), None),
    )


def _rejudged(rejudged: Rejudged) -> RejudgedView:
    reach = reach_of([agreement.comparison for agreement in rejudged.agreements])
    return RejudgedView(
        rejudged=rejudged,
        agreements=tuple((one, interval_mark(one.comparison, reach=reach)) for one in rejudged.agreements),
        reach=reach,
        shown=tuple(
            replace(
                one, question=_clipped(one.question), predictions=tuple(map(_clipped, one.predictions[:MAX_SAMPLES]))
            )
            for one in rejudged.disagreements[:MAX_DISAGREEMENTS]
        ),
    )


def _notes(board: Board, file: MeasuredFile) -> Iterator[str]:
    scores = board.scores(file)
    for verifier in file.verifiers:
        for name, found in scores.items():
            cut_off = found.verifiers[verifier].timed_out
            if cut_off:
                what = "1 response was" if cut_off == 1 else f"{cut_off:,} responses were"
                yield f"{name}: {what} not judged in time by {verifier}, which counts as wrong."
        ungradable = max(found.verifiers[verifier].ungradable_rows for found in scores.values())
        if ungradable:
            what = "1 row" if ungradable == 1 else f"{ungradable:,} rows"
            yield f"The label of {what} cannot be read by {verifier}, so every answer there is wrong."


def _groups(board: Board, file: MeasuredFile, *, sources: Sequence[str]) -> list[Group]:
    groups = []
    for source in [None, *(sources if len(sources) > 1 else ())]:
        scores = board.scores(file, datasource=source)
        groups.append(
            Group(
                title="All rows" if source is None else source,
                rows=max(found.rows for found in scores.values()),
                scores=scores,
                best=board.best(scores, verifier=file.verifier),
            )
        )
    return groups


def reach_of(comparisons: Sequence[Comparison]) -> float:
    """Return how far an axis must reach on either side of zero to hold all of them."""
    sizes = [abs(value) for comparison in comparisons for value in (comparison.low, comparison.high)]
    return max([*sizes, SMALLEST_REACH])


def interval_mark(comparison: Comparison, *, reach: float) -> IntervalMark:
    """Return where to draw a comparison on an axis from -reach to reach."""

    def place(value: float) -> float:
        return round(WIDTH * (value / reach + 1) / 2, 1)

    verdict = "up" if comparison.low > 0 else "down" if comparison.high < 0 else "even"
    return IntervalMark(
        low=place(comparison.low), high=place(comparison.high), dot=place(comparison.difference), verdict=verdict
    )


@dataclass(frozen=True, kw_only=True)
class ShownResponse:
    text: str
    right: bool
    truncated: bool
    tokens: int | None


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
                truncated=bool(response.truncated),
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
