"""Self-contained HTML pages, without external files: one about a run, and one that compares several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.records.metrics import FileScores, text_first
from lmm_r1.records.run_folder import Run
from lmm_r1.tools.evaluation.page_parts import FILTERS, duration, page_templates, percent, points
from lmm_r1.tools.report.charts import BarChart, BarSpec, bar_chart, difference_interval, line_chart, time_line
from lmm_r1.tools.report.curves import COLORS, MAX_POINTS, other_panels, overlays, panels, run_color, smoothing_window
from lmm_r1.tools.report.rollout_sample import DEFAULT_MAX_ROLLOUTS, Series, rollout_data, sample_rollouts
from lmm_r1.tools.report.stages import (
    HeldOutCell,
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
        bars=bar_chart([(row.name, _bars(row)) for row in rows]),
        max_points=MAX_POINTS,
        sample=sample,
        data=rollout_data(series, sample=sample),
        notes=notes([(stage.name, stage) for stage in run.stages], sample=sample),
    )


def render(template: str, **values: object) -> str:
    """Return a page as HTML; all values in a template are escaped."""
    drawing = (line_chart, panels, other_panels, time_line, smoothing_window, without_secrets)
    filters = FILTERS | {show.__name__: show for show in drawing}
    return page_templates(Path(__file__).parent, filters=filters).get_template(template).render(**values)


def _bars(row: StageRow) -> list[BarSpec]:
    return [BarSpec(name=cell.file, color=at % COLORS + 1, scores=cell.scores) for at, cell in enumerate(row.held_out)]


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
        tails = (
            _tail(folder, depth)
            for depth in range(1, len(folder.parts))
            if all(_tail(folder, depth) != _tail(other, depth) for other in others)
        )
        names.append(next(tails, str(folder)))
    return names


def _tail(folder: Path, depth: int) -> str:
    return "/".join(folder.parts[1:][-depth:])


def row_files(runs: Sequence[Run]) -> list[str]:
    """Return the files of held-out rows of all runs, `text` and `image` first."""
    return text_first(file for run in runs for file in run.evaluation.file_names)


def compared_rows(match: StageMatch, *, files: Sequence[str]) -> list[tuple[int, StageRow]]:
    """Return each run with its row, in which the changes are those from the first run; None for that run itself."""
    reference = {file: match.rows[0].scores(file) for file in files if 0 in match.rows}
    compared = []
    for run, row in sorted(match.rows.items()):
        cells = (_cell(file, row.scores(file), first=reference.get(file) if run else None) for file in files)
        compared.append((run, replace(row, held_out=tuple(cells))))
    return compared


def accuracy_charts(
    matches: Sequence[StageMatch], *, files: Sequence[str], names: Sequence[str]
) -> dict[str, BarChart]:
    """Return one chart of bars per file of rows: a group per stage, a bar per run."""
    charts = {}
    for file in files:
        stages = []
        for match in matches:
            scores = {run: row.scores(file) for run, row in match.rows.items()}
            bars = [
                BarSpec(name=f"{name}, {file}", color=run_color(run), scores=scores.get(run), run=run)
                for run, name in enumerate(names)
            ]
            stages.append((match.name, bars))
        if chart := bar_chart(stages):
            charts[file] = chart
    return charts


def _cell(file: str, scores: FileScores | None, *, first: FileScores | None) -> HeldOutCell:
    cell = HeldOutCell(file=file, scores=scores)
    if scores is None or scores.accuracy is None or first is None or first.accuracy is None:
        return cell
    interval = difference_interval(
        scores.accuracy, count=scores.rows, reference=first.accuracy, reference_count=first.rows
    )
    return replace(cell, change=scores.accuracy - first.accuracy, interval=interval)
