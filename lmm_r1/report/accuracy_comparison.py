"""Held-out accuracy of several runs, stage by stage, with the differences to the first run."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.records.evaluation import FileScores
from lmm_r1.records.run import Run
from lmm_r1.report.bar_chart import BarChart, BarSpec, bar_chart, difference_interval
from lmm_r1.report.overlay import run_color
from lmm_r1.report.stages import StageMatch, StageRow


@dataclass(frozen=True, kw_only=True)
class ComparedCell:
    """One run's stage on one file of held-out rows."""

    scores: FileScores | None
    difference: float | None
    """Accuracy less that of the first run; None for the first run itself, or where either is unknown."""
    interval: tuple[float, float] | None
    """Where the difference lies at 95 % confidence."""

    @property
    def is_clear(self) -> bool:
        """Whether chance alone, in which rows were held out, hardly explains the difference."""
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
    found = dict.fromkeys(file for run in runs for file in run.evaluation.file_names)
    first = [name for name in ("text", "image") if name in found]
    return [*first, *(name for name in found if name not in first)]


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
    """Return what a stage reached on a file of rows, None where it was not evaluated."""
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
