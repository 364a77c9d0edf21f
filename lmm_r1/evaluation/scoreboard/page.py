"""An evaluation as one self-contained HTML page: no script, no network, no file beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from lmm_r1.evaluation.comparison import Comparison
from lmm_r1.evaluation.disagreements import Agreement, Disagreement, Rejudged
from lmm_r1.evaluation.page_templates import page_templates
from lmm_r1.evaluation.scoreboard.board import Board, MeasuredFile
from lmm_r1.evaluation.scoreboard.shown_rows import MAX_SAMPLES, ShownRow, clipped, shown_rows
from lmm_r1.evaluation.scoreboard.terminal import (
    CONFIDENCE_TEXT,
    change,
    columns,
    count,
    episode_columns,
    estimate,
    interval,
    mean,
    p_value,
    share,
)
from lmm_r1.evaluation.scores import SampleScores

FILTERS = {show.__name__: show for show in (share, count, mean, estimate, interval, p_value, change)}
MAX_SKIPPED = 20
PAGE_SETTINGS = (
    *("agent", "agent_options", "agent_max_turns", "agent_max_images"),
    *("dtype", "top_p", "seed", "max_model_len", "bootstrap_resamples", "judge_timeout"),
)
"""Of the evaluation's settings, those that a reader needs beside what stands with each file."""
WIDTH = 200.0
SMALLEST_REACH = 0.01
"""An axis reaches at least one percentage point to either side."""
MAX_DISAGREEMENTS = 200


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows of the table for a whole file, or for one of its data sources."""

    title: str
    rows: int
    scores: dict[str, SampleScores]
    best: set[str]
    played: dict[str, dict[str, str]]
    """Of episodes, what is told of each checkpoint's, by the column's name."""

    @property
    def played_columns(self) -> list[str]:
        return columns(self.played.values())

    def most_turns(self, verifier: str) -> int:
        """Return up to how many turns it is told what was solved within them, 0 where there are no episodes."""
        return max(len(self.scores[name].verifiers[verifier].within_turns) for name in self.scores)


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
                one, question=clipped(one.question), predictions=tuple(map(clipped, one.predictions[:MAX_SAMPLES]))
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
                played={name: told for name, found in scores.items() if (told := episode_columns(found))},
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
