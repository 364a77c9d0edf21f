"""Self-contained HTML pages, without external files: one about a run, and one that compares several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.evaluation.page_parts import FILTERS, duration, page_templates, percent, points
from lmm_r1.records.metrics import FileScores, text_first
from lmm_r1.records.run_folder import Run, Stage
from lmm_r1.report.charts import BarChart, BarSpec, TimeLine, bar_chart, difference_interval, line_chart, time_line
from lmm_r1.report.curves import COLORS, MAX_POINTS, Panel, other_panels, overlays, panels, run_color, smoothing_window
from lmm_r1.report.rollout_sample import DEFAULT_MAX_ROLLOUTS, Series, rollout_data, sample_rollouts
from lmm_r1.report.stages import (
    StageMatch,
    StageRow,
    match_stages,
    notes,
    settings_differences,
    stage_rows,
    without_secrets,
)

# The evaluation settings that are needed to interpret an accuracy.
SAMPLING_SETTINGS = ("temperature", "top_p", "n_samples", "max_new_tokens", "dtype", "seed")


@dataclass(frozen=True, kw_only=True)
class StageView:
    stage: Stage
    anchor: str
    panels: Sequence[Panel]
    other_panels: Sequence[Panel]
    time_line: TimeLine | None
    is_smoothed: bool
    steps_per_point: int
    """More than 1 if points of a long stage are means of neighbouring steps."""
    settings: str | None


@dataclass(frozen=True, kw_only=True)
class Headline:
    title: str
    value: str
    remark: str


def build_report(
    run: Run,
    *,
    seconds: float | None = None,
    max_rollouts: int = DEFAULT_MAX_ROLLOUTS,
    written_at: datetime | None = None,
) -> str:
    """Return the page of a run as HTML, with at most `max_rollouts` rollouts; `seconds` replaces the sum over its stages."""
    rows = stage_rows(run)
    files = run.evaluation.file_names
    series = [Series(run=run.name, stage=stage, color=at % COLORS + 1) for at, stage in enumerate(run.stages)]
    sample = sample_rollouts(series, limit=max_rollouts)
    seconds = run.seconds if seconds is None else seconds
    return render(
        "page.html.j2",
        run=run,
        title=run.name,
        written_at=written_at or datetime.now(tz=timezone.utc),
        headlines=_headlines(run, rows=rows, seconds=seconds),
        rows=rows,
        files=files,
        evaluated_with=_evaluated_with(run),
        bars=bar_chart([(row.name, _bars(row, files=files)) for row in rows]),
        stages=[_stage_view(stage, number=number) for number, stage in enumerate(run.stages, start=1)],
        sample=sample,
        data=rollout_data(series, sample=sample),
        notes=notes([(stage.name, stage) for stage in run.stages], sample=sample),
    )


def render(template: str, **values: object) -> str:
    """Return a page as HTML; all values in a template are escaped."""
    filters = FILTERS | {"line_chart": line_chart}
    return page_templates(Path(__file__).parent, filters=filters).get_template(template).render(**values)


def _bars(row: StageRow, *, files: Sequence[str]) -> list[BarSpec]:
    cells = zip(files, row.held_out, strict=True)
    return [BarSpec(name=file, color=at % COLORS + 1, scores=cell.scores) for at, (file, cell) in enumerate(cells)]


def _stage_view(stage: Stage, *, number: int) -> StageView:
    return StageView(
        stage=stage,
        anchor=f"stage-{number}",
        panels=panels(stage.metrics),
        other_panels=other_panels(stage.metrics),
        time_line=time_line(stage.metrics),
        is_smoothed=smoothing_window(len(stage.metrics.rows)) > 1,
        steps_per_point=math.ceil(len(stage.metrics.rows) / MAX_POINTS),
        settings=without_secrets(stage.settings) if stage.settings is not None else None,
    )


def _headlines(run: Run, *, rows: list[StageRow], seconds: float) -> list[Headline]:
    first, held_out = rows[0], []
    for file in run.evaluation.file_names:
        reached = [(row, accuracy) for row in rows if row.stage and (accuracy := row.accuracy(file)) is not None]
        if reached:
            row, accuracy = reached[-1]
            began = None if row is first else first.accuracy(file)
            remark = f"after {row.name}" if began is None else f"{points(accuracy - began)} points since {first.name}"
            held_out.append(Headline(title=f"Held-out {file} accuracy", value=percent(accuracy), remark=remark))
    count = len(run.stages)
    took = Headline(
        title="Time",
        value=duration(seconds),
        remark=f"{run.steps:,} steps in {count} {'stage' if count == 1 else 'stages'}",
    )
    return [*held_out, took]


def _evaluated_with(run: Run) -> dict[str, str]:
    facts = {}
    for file in run.evaluation.file_names:
        counts = {checkpoint.files[file].rows for checkpoint in run.evaluation.checkpoints if file in checkpoint.files}
        facts[f"{file} rows"] = " or ".join(f"{count:,}" for count in sorted(counts))
    settings = run.evaluation.settings
    return facts | {name: str(settings[name]) for name in SAMPLING_SETTINGS if settings.get(name) is not None}


def build_comparison(runs: Sequence[Run], *, max_rollouts: int = DEFAULT_MAX_ROLLOUTS) -> str:
    """Return the page of several runs as HTML; differences are relative to the first of them."""
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
        runs=runs,
        names=names,
        colors=[run_color(at) for at in range(len(runs))],
        files=files,
        bars=accuracy_charts(matches, files=files, names=names),
        stages=[(match.name, compared_rows(match, files=files)) for match in matches],
        overlays=overlays(matches, names=names),
        differences=settings_differences(runs, matches=matches),
        sample=sample,
        data=rollout_data(series, sample=sample),
        notes=notes([(f"{member.run}, {member.stage.name}", member.stage) for member in series], sample=sample),
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return each folder's name, preceded by as many parent folders as are needed to make it unique.

    `runs/a/demo`, `runs/b/demo` and `runs/c` become `a/demo`, `b/demo` and `c`. Raises UserError for a repeated folder.
    """
    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(resolved):
        if folder in resolved[:index]:
            raise UserError(f"{folders[index]}: this run is given twice; leave one of them out")
    names = []
    for folder in resolved:
        others = [other for other in resolved if other != folder]
        tails = (_tail(folder, depth) for depth in range(1, len(folder.parts)) if not _shared(folder, others, depth))
        names.append(next(tails, str(folder)))
    return names


def _shared(folder: Path, others: Sequence[Path], depth: int) -> bool:
    return _tail(folder, depth) in {_tail(other, depth) for other in others}


def _tail(folder: Path, depth: int) -> str:
    return "/".join(folder.parts[1:][-depth:])


@dataclass(frozen=True, kw_only=True)
class ComparedCell:
    """One run's stage on one file of held-out rows."""

    scores: FileScores | None
    difference: float | None
    """Accuracy minus that of the first run; None for the first run itself, or if either is unknown."""
    interval: tuple[float, float] | None

    @property
    def is_clear(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    run: int
    row: StageRow
    cells: tuple[ComparedCell, ...]


def row_files(runs: Sequence[Run]) -> list[str]:
    """Return the files of held-out rows of all runs, `text` and `image` first."""
    return text_first(file for run in runs for file in run.evaluation.file_names)


def compared_rows(match: StageMatch, *, files: Sequence[str]) -> list[ComparedRow]:
    reference = {file: scores_on(match.rows[0], file=file) for file in files if 0 in match.rows}
    return [
        ComparedRow(
            run=run,
            row=row,
            cells=tuple(
                _cell(scores_on(row, file=file), first=reference.get(file) if run != 0 else None) for file in files
            ),
        )
        for run, row in sorted(match.rows.items())
    ]


def scores_on(row: StageRow, *, file: str) -> FileScores | None:
    return next((cell.scores for cell in row.held_out if cell.file == file), None)


def accuracy_charts(
    matches: Sequence[StageMatch], *, files: Sequence[str], names: Sequence[str]
) -> dict[str, BarChart]:
    """Return one chart of bars per file of rows: a group per stage, a bar per run."""
    charts = {
        file: bar_chart([(match.name, _compared_bars(match, file=file, names=names)) for match in matches])
        for file in files
    }
    return {file: chart for file, chart in charts.items() if chart}


def _compared_bars(match: StageMatch, *, file: str, names: Sequence[str]) -> list[BarSpec]:
    return [
        BarSpec(
            name=f"{name}, {file}",
            color=run_color(run),
            scores=scores_on(match.rows[run], file=file) if run in match.rows else None,
            run=run,
        )
        for run, name in enumerate(names)
    ]


def _cell(scores: FileScores | None, *, first: FileScores | None) -> ComparedCell:
    if scores is None or scores.accuracy is None or first is None or first.accuracy is None:
        return ComparedCell(scores=scores, difference=None, interval=None)
    interval = difference_interval(
        scores.accuracy, count=scores.rows, reference=first.accuracy, reference_count=first.rows
    )
    return ComparedCell(scores=scores, difference=scores.accuracy - first.accuracy, interval=interval)
