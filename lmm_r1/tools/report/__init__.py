"""Reports: HTML pages, one about a run and its stages and one that compares runs; and a curriculum's summary as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import yaml

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import write_json_object
from lmm_r1.records.metrics import EvaluatedCheckpoint, FileScores, text_first
from lmm_r1.records.run_folder import ERROR_FILE, Run, Stage
from lmm_r1.tools.evaluation.page_parts import FILTERS, duration, moment, page_templates, percent, percent_text, points
from lmm_r1.tools.report.charts import BarChart, BarSpec, bar_chart, difference_interval, line_chart, time_line
from lmm_r1.tools.report.curves import COLORS, MAX_POINTS, other_panels, overlays, panels, run_color, smoothing_window
from lmm_r1.tools.report.rollout_sample import (
    DEFAULT_MAX_ROLLOUTS,
    RolloutSample,
    Series,
    rollout_data,
    sample_rollouts,
)
from remote_rm.redaction import HIDDEN, hidden_settings, hidden_text, is_secret

JUDGED_BY_RULE = "judged_by_rule"
"""The reward part of `remote_rm.llm_judge_verifier` that reports that there was no judge to ask."""


@dataclass(frozen=True, kw_only=True)
class HeldOutCell:
    """A stage on one file of held-out rows."""

    file: str
    scores: FileScores | None
    change: float | None = None
    """Accuracy minus that of the checkpoint that the stage began with, or of the first run; None if either is unknown."""
    interval: tuple[float, float] | None = None
    """Of the change, if runs are compared."""

    @property
    def is_clear(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """A stage, or a checkpoint that was evaluated but is not a stage of this run, such as a baseline."""

    name: str
    stage: Stage | None
    began_with: str | None
    """The row above: the previous stage, or for the first one a checkpoint that was evaluated before it."""
    held_out: tuple[HeldOutCell, ...]

    def scores(self, file: str) -> FileScores | None:
        """Return its scores on a file of rows, None if they are unknown."""
        return next((cell.scores for cell in self.held_out if cell.file == file), None)

    def accuracy(self, file: str) -> float | None:
        """Return its accuracy on a file of rows, None if it is unknown."""
        scores = self.scores(file)
        return scores.accuracy if scores else None


def stage_rows(run: Run) -> list[StageRow]:
    """Return the stages in order; other checkpoints come before or after them, in the order of evaluation."""
    checkpoints = run.evaluation.checkpoints
    of_stages = {checkpoint.name for checkpoint in map(run.checkpoint, run.stages) if checkpoint}
    first_owned = next((index for index, checkpoint in enumerate(checkpoints) if checkpoint.name in of_stages), 0)
    before, after = (
        [_row(run, checkpoint.name, checkpoint) for checkpoint in part if checkpoint.name not in of_stages]
        for part in (checkpoints[:first_owned], checkpoints[first_owned:])
    )
    rows = before
    for stage in run.stages:
        rows.append(_row(run, stage.name, run.checkpoint(stage), stage=stage, above=rows[-1] if rows else None))
    return [*rows, *after]


def _row(
    run: Run,
    name: str,
    checkpoint: EvaluatedCheckpoint | None,
    *,
    stage: Stage | None = None,
    above: StageRow | None = None,
) -> StageRow:
    cells = []
    for file in run.evaluation.file_names:
        scores = checkpoint.files.get(file) if checkpoint else None
        now, earlier = scores.accuracy if scores else None, above.accuracy(file) if above else None
        change = None if now is None or earlier is None else now - earlier
        cells.append(HeldOutCell(file=file, scores=scores, change=change))
    return StageRow(name=name, stage=stage, began_with=above.name if above else None, held_out=tuple(cells))


@dataclass(frozen=True, kw_only=True)
class StageMatch:
    name: str
    rows: dict[int, StageRow]
    """By the index of the run among those compared."""


def match_stages(runs: Sequence[Run]) -> list[StageMatch]:
    """Return the stages of all runs, matched by name; if all runs have one stage, these are matched.

    They keep the order of the first run, followed by the stages that only later runs have.
    """
    tables = [stage_rows(run) for run in runs]
    if all(len(table) == 1 for table in tables):
        names = dict.fromkeys(table[0].name for table in tables)
        return [StageMatch(name=", ".join(names), rows={run: table[0] for run, table in enumerate(tables)})]
    matches: dict[tuple[str, int], dict[int, StageRow]] = {}
    for run, table in enumerate(tables):
        # Two stages of a run may have the same name; the first is matched with the first of another run.
        seen: Counter[str] = Counter()
        for row in table:
            matches.setdefault((row.name, seen[row.name]), {})[run] = row
            seen[row.name] += 1
    return [StageMatch(name=name, rows=rows) for (name, _), rows in matches.items()]


def summarize(run: Run, *, seconds: float | None = None) -> dict[str, object]:
    """Return the stages with their held-out accuracies, None if not evaluated."""
    stages = []
    for stage in run.stages:
        scores = {f"{file}_accuracy": run.held_out(stage).get(file) for file in ("text", "image")}
        accuracies = {name: found and found.accuracy for name, found in scores.items()}
        stages.append({"name": stage.name, **accuracies, "steps": stage.steps})
    return {"seconds": run.seconds if seconds is None else seconds, "stages": stages}


def write_summary(run: Run, *, path: Path, seconds: float | None = None) -> None:
    write_json_object(path, summarize(run, seconds=seconds))


def notes(stages: Sequence[tuple[str, Stage]], *, sample: RolloutSample) -> list[str]:
    """Return a sentence for each thing that is missing or was left out."""
    found = [note for name, stage in stages for note in _stage_notes(stage, name=name)]
    if sample.missing_images:
        found.append(
            f"Images of the rollouts below that could not be shown: {sample.missing_images}; each shows the reason."
        )
    return found


def _stage_notes(stage: Stage, *, name: str) -> list[str]:
    found = []
    torn = stage.metrics.torn_lines + stage.rollouts.torn_lines
    if torn:
        found.append(f"{name}: {torn} incomplete last {'line' if torn == 1 else 'lines'} left out (writer stopped).")
    if stage.metrics.repeated_steps:
        found.append(
            f"{name}: steps logged more than once, as after a resume: {stage.metrics.repeated_steps}; "
            "the last values are shown."
        )
    missing = sum(value is None for row in stage.metrics.rows for value in row.values.values())
    if missing:
        found.append(f"{name}: values that are not finite, gaps in the curves: {missing}.")
    found += [f"{name}: {note}" for note in _judge_notes(stage)]
    if stage.state == "running":
        found.append(f"{name} was running when this page was written; make the page again to see the rest.")
    elif stage.state == "stopped":
        assert stage.last_sign_at is not None, "a stopped stage has a last sign of life"
        why = f"; its error is in {ERROR_FILE}" if (stage.folder / ERROR_FILE).is_file() else ""
        seen = moment(stage.last_sign_at)
        found.append(f"{name} was stopped before its end; its last sign of life was at {seen}{why}.")
    return found


def _judge_notes(stage: Stage) -> list[str]:
    """Return from which step on a rule judged instead of a language model, and how often it did before."""
    shares = [(step, share) for step, share in stage.metrics.series(JUDGED_BY_RULE) if share is not None]
    judged = [place for place, (_, share) in enumerate(shares, start=1) if share < 0.5]
    last = judged[-1] if judged else 0
    found = []
    if before := [share for _, share in shares[:last] if share > 0]:
        found.append(
            f"the judge gave no verdict on {percent_text(sum(before) / last)} % of the responses of steps {shares[0][0]} to "
            f"{shares[last - 1][0]}, and the rule judged them ({JUDGED_BY_RULE})."
        )
    if shares[last:]:
        found.append(
            f"from step {shares[last][0]} on the rule judged instead of the judge, which had no budget left or failed "
            f"({JUDGED_BY_RULE})."
        )
    return found


# Evaluation settings that name input and output instead of how it was done.
EVALUATION_PLACES = ("checkpoints", "files", "output")
SETTING = re.compile(r"^(?P<before>\s*(?:-\s+)?(?P<name>[\w.\-\"']+)\s*:\s+)(?P<value>\S.*)$")
EMPTY_VALUES = ("null", "~", "''", '""', "false", "true")


@dataclass(frozen=True, kw_only=True)
class SettingsDifference:
    """The settings of one stage that differ between runs."""

    title: str
    runs: tuple[int, ...]
    same: int
    rows: dict[str, tuple[str | None, ...]]
    """By dotted name: the value in each of `runs`, None if it is not set."""
    unknown: tuple[int, ...]


def settings_differences(runs: Sequence[Run], *, matches: Sequence[StageMatch]) -> list[SettingsDifference]:
    """Return the differences of each stage that several runs have, then those of the evaluation."""
    found = []
    for match in matches:
        stages = {run: row.stage for run, row in match.rows.items() if row.stage}
        if len(stages) > 1:
            found.append(_difference(match.name, {run: _settings(stage.settings) for run, stage in stages.items()}))
    evaluated = {place: run.evaluation.settings for place, run in enumerate(runs) if run.evaluation.checkpoints}
    if len(evaluated) > 1:
        kept = [{name: one[name] for name in one if name not in EVALUATION_PLACES} for one in evaluated.values()]
        found.append(_difference("evaluation", dict(zip(evaluated, map(_flat, kept), strict=True))))
    return found


def _difference(title: str, settings: Mapping[int, dict[str, str] | None]) -> SettingsDifference:
    known = {run: values for run, values in sorted(settings.items()) if values is not None}
    names = dict.fromkeys(name for values in known.values() for name in values)
    rows = {name: tuple(values.get(name) for values in known.values()) for name in names}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
    return SettingsDifference(
        title=title,
        runs=tuple(known),
        same=len(rows) - len(differing),
        rows=differing,
        unknown=tuple(run for run, values in sorted(settings.items()) if values is None),
    )


def _settings(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    try:
        # The base loader keeps values as they are written: 1e-6 stays 1e-6, and 2026-01-31 does not become a date.
        settings = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return None
    return _flat(settings) if isinstance(settings, dict) else None


def _flat(settings: Mapping[str, object], *, prefix: str = "") -> dict[str, str]:
    """Return settings by their dotted names, with credentials hidden."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not is_secret(name):
            flat |= _flat(value, prefix=f"{name}.")
        else:
            shown = value if value == "null" else hidden_settings(value, name=name)
            flat[name] = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    return flat


def without_secrets(text: str) -> str:
    """Return settings with the value of every key, token and password replaced: `key: ab12` becomes `key: (hidden)`.

    Runs of earlier versions have written some of them.
    """
    lines = text.splitlines()
    for place, line in enumerate(lines):
        setting = SETTING.match(line)
        if setting and setting["value"].strip().lower() not in EMPTY_VALUES:
            hidden = f"{setting['before']}{HIDDEN}" if is_secret(setting["name"].strip("\"'")) else hidden_text(line)
            lines[place] = hidden
    return "\n".join(lines)


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
    remark = f"{run.steps:,} steps in {count} {'stage' if count == 1 else 'stages'}"
    return [*held_out, Headline(title="Time", value=duration(seconds), remark=remark)]


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
