"""One self-contained HTML page that compares several runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.records.metrics import FileScores, text_first
from lmm_r1.records.run import Run
from lmm_r1.report.bar_chart import BarChart, BarSpec, bar_chart, difference_interval
from lmm_r1.report.curves import smoothing_window
from lmm_r1.report.line_chart import LineChart, line_chart
from lmm_r1.report.overlay import Overlay, overlays, run_color
from lmm_r1.report.page import render
from lmm_r1.report.rollout_sample import (
    DEFAULT_MAX_ROLLOUTS,
    Series,
    rollout_data,
    sample_rollouts,
)
from lmm_r1.report.stages import StageMatch, StageRow, match_stages, notes, settings_differences, total_seconds


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The page's summary of one run."""

    name: str
    color: int
    run: Run
    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class OverlayView:
    """Charts of stages whose curves share their axes."""

    title: str
    anchor: str
    runs: int
    charts: tuple[LineChart, ...]
    other_charts: tuple[LineChart, ...]
    is_smoothed: bool


def build_comparison(runs: Sequence[Run], *, max_rollouts: int = DEFAULT_MAX_ROLLOUTS) -> str:
    """Return the page of several runs as HTML; differences are relative to the first of them.

    Args:
        max_rollouts: the most rollouts to embed, spread evenly over the steps of all runs.

    Raises:
        UserError: two of the runs are the same folder.
    """
    names = distinct_names([run.folder for run in runs])
    matches = match_stages(runs)
    files = row_files(runs)
    series = [
        Series(run=name, stage=stage, color=run_color(at))
        for at, (name, run) in enumerate(zip(names, runs, strict=True))
        for stage in run.stages
    ]
    sample = sample_rollouts(series, limit=max_rollouts)
    return render(
        "comparison.html.j2",
        title=f"{len(runs)} runs",
        written_at=datetime.now(tz=timezone.utc),
        runs=[_run_view(run, name=name, at=at) for at, (name, run) in enumerate(zip(names, runs, strict=True))],
        files=files,
        bars=accuracy_charts(matches, files=files, names=names),
        stages=[(match.name, compared_rows(match, files=files)) for match in matches],
        overlays=[
            _overlay_view(overlay, number=number) for number, overlay in enumerate(overlays(matches, names=names), 1)
        ],
        differences=settings_differences(runs, matches=matches),
        sample=sample,
        data=rollout_data(series, sample=sample),
        notes=notes([(f"{member.run}, {member.stage.name}", member.stage) for member in series], sample=sample),
    )


def _run_view(run: Run, *, name: str, at: int) -> RunView:
    return RunView(
        name=name,
        color=run_color(at),
        run=run,
        steps=sum(stage.steps for stage in run.stages),
        seconds=total_seconds(run),
    )


def _overlay_view(overlay: Overlay, *, number: int) -> OverlayView:
    return OverlayView(
        title=overlay.title,
        anchor=f"curves-{number}",
        runs=len({curve.run for curve in overlay.curves}),
        charts=tuple(map(line_chart, overlay.panels)),
        other_charts=tuple(map(line_chart, overlay.other_panels)),
        is_smoothed=any(smoothing_window(len(curve.stage.metrics.rows)) > 1 for curve in overlay.curves),
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return each folder's name, preceded by as many parent folders as are needed to make it unique.

    `runs/a/demo`, `runs/b/demo` and `runs/c` become `a/demo`, `b/demo` and `c`. Raises UserError for a repeated folder.
    """
    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(resolved):
        if folder in resolved[:index]:
            raise UserError(f"{folders[index]}: this run is given twice; leave one of them out")
    return [_name(folder, others=[other for other in resolved if other != folder]) for folder in resolved]


def _name(folder: Path, *, others: Sequence[Path]) -> str:
    depths = range(1, len(folder.parts))
    return next((name for depth in depths if (name := _tail(folder, depth)) not in _tails(others, depth)), str(folder))


def _tails(folders: Sequence[Path], depth: int) -> set[str]:
    return {_tail(folder, depth) for folder in folders}


def _tail(folder: Path, depth: int) -> str:
    return "/".join(folder.parts[1:][-depth:])


@dataclass(frozen=True, kw_only=True)
class ComparedCell:
    """One run's stage on one file of held-out rows."""

    scores: FileScores | None
    difference: float | None
    """Accuracy minus that of the first run; None for the first run itself, or if either is unknown."""
    interval: tuple[float, float] | None
    """The 95 % confidence interval of the difference."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One stage of one run."""

    run: int
    row: StageRow
    cells: tuple[ComparedCell, ...]
    """One per row file of all evaluations."""


def row_files(runs: Sequence[Run]) -> list[str]:
    """Return the files of held-out rows of all runs, `text` and `image` first."""
    return text_first(file for run in runs for file in run.evaluation.file_names)


def compared_rows(match: StageMatch, *, files: Sequence[str]) -> list[ComparedRow]:
    """Return the rows of one stage, in the order of the runs."""
    first = match.rows.get(0)
    return [
        ComparedRow(
            run=run,
            row=row,
            cells=tuple(_cell(scores_on(row, file=file), first=_first(first, run=run, file=file)) for file in files),
        )
        for run, row in sorted(match.rows.items())
    ]


def scores_on(row: StageRow, *, file: str) -> FileScores | None:
    """Return the scores of a stage on a file of rows, None if it was not evaluated."""
    return next((cell.scores for cell in row.held_out if cell.file == file), None)


def accuracy_charts(
    matches: Sequence[StageMatch], *, files: Sequence[str], names: Sequence[str]
) -> dict[str, BarChart]:
    """Return one chart of bars per file of rows: a group per stage, a bar per run."""
    charts = {
        file: bar_chart([(match.name, _bars(match, file=file, names=names)) for match in matches]) for file in files
    }
    return {file: chart for file, chart in charts.items() if chart}


def _bars(match: StageMatch, *, file: str, names: Sequence[str]) -> list[BarSpec]:
    return [
        BarSpec(
            name=f"{name}, {file}",
            color=run_color(run),
            scores=scores_on(match.rows[run], file=file) if run in match.rows else None,
            run=run,
        )
        for run, name in enumerate(names)
    ]


def _first(first: StageRow | None, *, run: int, file: str) -> FileScores | None:
    return scores_on(first, file=file) if first and run != 0 else None


def _cell(scores: FileScores | None, *, first: FileScores | None) -> ComparedCell:
    if scores is None or scores.accuracy is None or first is None or first.accuracy is None:
        return ComparedCell(scores=scores, difference=None, interval=None)
    interval = difference_interval(
        scores.accuracy, count=scores.rows, reference=first.accuracy, reference_count=first.rows
    )
    return ComparedCell(scores=scores, difference=scores.accuracy - first.accuracy, interval=interval)
