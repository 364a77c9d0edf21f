"""One self-contained HTML page about a run, without external files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from lmm_r1.evaluation.page_parts import FILTERS, duration, page_templates, percent, points
from lmm_r1.records.run import Run, Stage
from lmm_r1.report.bar_chart import BarSpec, bar_chart
from lmm_r1.report.curves import MAX_POINTS, other_panels, panels, smoothing_window
from lmm_r1.report.line_chart import LineChart, line_chart
from lmm_r1.report.overlay import COLORS, TimeLine, time_line
from lmm_r1.report.rollout_sample import (
    DEFAULT_MAX_ROLLOUTS,
    Series,
    rollout_data,
    sample_rollouts,
)
from lmm_r1.report.stages import HeldOutCell, StageRow, notes, stage_before, stage_rows, total_seconds, without_secrets

# The evaluation settings that are needed to interpret an accuracy.
SAMPLING_SETTINGS = ("temperature", "top_p", "n_samples", "max_new_tokens", "dtype", "seed")


@dataclass(frozen=True, kw_only=True)
class StageView:
    """The contents of the page for one stage, below the table."""

    stage: Stage
    anchor: str
    charts: tuple[LineChart, ...]
    other_charts: tuple[LineChart, ...]
    time_line: TimeLine | None
    is_smoothed: bool
    steps_per_point: int
    """More than 1 if points of a long stage are means of neighbouring steps."""
    settings: str | None


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One large number at the top of the page."""

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
    """Return the page of a run as HTML.

    Args:
        seconds: the duration of the whole run; None takes the sum over the stages.
        max_rollouts: the most rollouts to embed, spread evenly over the steps.
        written_at: the time of writing shown on the page; None is now.
    """
    rows = stage_rows(run)
    files = run.evaluation.file_names
    series = [Series(run=run.name, stage=stage, color=at % COLORS + 1) for at, stage in enumerate(run.stages)]
    sample = sample_rollouts(series, limit=max_rollouts)
    seconds = total_seconds(run) if seconds is None else seconds
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
    return page_templates(Path(__file__).parent, filters=FILTERS).get_template(template).render(**values)


def _bars(row: StageRow, *, files: Sequence[str]) -> list[BarSpec]:
    cells = zip(files, row.held_out, strict=True)
    return [BarSpec(name=file, color=at % COLORS + 1, scores=cell.scores) for at, (file, cell) in enumerate(cells)]


def _stage_view(stage: Stage, *, number: int) -> StageView:
    return StageView(
        stage=stage,
        anchor=f"stage-{number}",
        charts=tuple(line_chart(panel) for panel in panels(stage.metrics)),
        other_charts=tuple(line_chart(panel) for panel in other_panels(stage.metrics)),
        time_line=time_line(stage.metrics),
        is_smoothed=smoothing_window(len(stage.metrics.rows)) > 1,
        steps_per_point=math.ceil(len(stage.metrics.rows) / MAX_POINTS),
        settings=without_secrets(stage.settings) if stage.settings is not None else None,
    )


def _headlines(run: Run, *, rows: list[StageRow], seconds: float) -> list[Headline]:
    stages = [row for row in rows if row.stage]
    reached = [_newest(stages, column=column) for column in range(len(run.evaluation.file_names))]
    held_out = [
        Headline(
            title=f"Held-out {cell.file} accuracy",
            value=percent(accuracy),
            remark=(
                f"{points(cell.change)} points since {run.stages[0].name}{_since_before(run, name, cell)}"
                if cell.change is not None
                else f"after {name}"
            ),
        )
        for name, cell, accuracy in filter(None, reached)
    ]
    steps = sum(stage.steps for stage in run.stages)
    count = len(run.stages)
    took = Headline(
        title="Time",
        value=duration(seconds),
        remark=f"{steps:,} steps in {count} {'stage' if count == 1 else 'stages'}",
    )
    return [*held_out, took]


def _since_before(run: Run, name: str, cell: HeldOutCell) -> str:
    before = next((stage_before(run, stage) for stage in run.stages if stage.name == name), None)
    return f", {points(cell.step)} since {before.name}" if before and cell.step is not None else ""


def _evaluated_with(run: Run) -> dict[str, str]:
    """Return the number of rows of each held-out file, and how responses to them were sampled."""
    facts = {}
    for file in run.evaluation.file_names:
        counts = {checkpoint.files[file].rows for checkpoint in run.evaluation.checkpoints if file in checkpoint.files}
        facts[f"{file} rows"] = " or ".join(f"{count:,}" for count in sorted(counts))
    settings = run.evaluation.settings
    return facts | {name: str(settings[name]) for name in SAMPLING_SETTINGS if settings.get(name) is not None}


def _newest(rows: list[StageRow], *, column: int) -> tuple[str, HeldOutCell, float] | None:
    """Return the last stage with an accuracy in this column of the table, its cell and that accuracy."""
    for row in reversed(rows):
        cell = row.held_out[column]
        if cell.scores and cell.scores.accuracy is not None:
            return row.name, cell, cell.scores.accuracy
    return None
