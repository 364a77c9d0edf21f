"""The stages of a run: their table, summary and notes; and which stages of several runs are compared."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lmm_r1.files.json_files import write_json_object
from lmm_r1.records.metrics import EvaluatedCheckpoint, FileScores
from lmm_r1.records.run_folder import ERROR_FILE, Run, Stage
from lmm_r1.tools.evaluation.page_parts import moment, percent_text
from lmm_r1.tools.report.rollout_sample import RolloutSample
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

    return {
        "seconds": run.seconds if seconds is None else seconds,
        "stages": [
            {
                "name": stage.name,
                **{
                    f"{file}_accuracy": scores and scores.accuracy
                    for file in ("text", "image")
                    for scores in [run.held_out(stage).get(file)]
                },
                "steps": stage.steps,
            }
            for stage in run.stages
        ],
    }


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
        kept = {
            place: _flat({name: value for name, value in settings.items() if name not in EVALUATION_PLACES})
            for place, settings in evaluated.items()
        }
        found.append(_difference("evaluation", kept))
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
