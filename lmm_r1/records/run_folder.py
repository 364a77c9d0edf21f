"""A run folder: what a stage writes while it runs, and the stages of a run or a curriculum as they are read."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from lmm_r1.data.messages import NO_PROMPT
from lmm_r1.data.training_rows import LeftOutRow
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import locked, write_atomically, write_bytes_atomically
from lmm_r1.files.json_files import (
    LARGEST_NUMBER,
    Count,
    JsonLine,
    append_json_lines,
    checked,
    cut_torn_line,
    read_json_lines,
    read_json_object,
    text_field,
    write_json_object,
)
from lmm_r1.records.metrics import (
    EVALUATION_FILE,
    METRICS_FILE,
    NO_CALLBACKS,
    SPAN_PREFIX,
    STEP,
    Callbacks,
    EvaluatedCheckpoint,
    FileScores,
    HeldOutEvaluation,
    MetricLog,
    MetricRow,
    append_metrics,
    last_seconds,
    read_evaluation,
    read_metrics,
)
from lmm_r1.records.rollouts import IMAGES_FOLDER, ROLLOUTS_FILE, RolloutLog, read_rollouts
from lmm_r1.records.session import SESSION_FILE, TrainingSession, kept_session, read_session, running_elsewhere
from lmm_r1.records.trackers import TRACKERS_FILE

LEFT_OUT_FILE = "left_out_rows.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
"""Which evaluations have measured the stage's model, and under which name."""
# Files and folders that a run appends to.
_RECORDS = (METRICS_FILE, ROLLOUTS_FILE, IMAGES_FOLDER, TRACKERS_FILE, LEFT_OUT_FILE, EVALUATIONS_FILE, SESSION_FILE)
STAGE_FILE = "stage.json"
ERROR_FILE = "error.txt"
"""The traceback of the error that ended a session."""
SETTINGS_FILE = "run_config.yaml"
LOCK_FILE = ".lock"
STAGE_TITLES = {
    "fre": "text stage, Foundational Reasoning Enhancement",
    "mgt": "image stage, Multimodal Generalization Training",
}
"""What the short names of LMM-R1's stages stand for."""


@dataclass(kw_only=True)
class RunFolder:
    """Append-only records of one stage; a resumed run continues them."""

    path: Path
    name: str
    kind: str
    origins: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """The dataset of each row and its index in it, by the row's location."""
    callbacks: Callbacks = NO_CALLBACKS
    ended_at: int | None = None
    """The step after which a callback has ended the run."""
    started: float = field(default_factory=time.time)
    """When the stage would have started without a break: `open` subtracts the time of earlier sessions."""
    _first_started: float | None = None
    """When its first session began, set by `session`."""
    _first: tuple[int, float] | None = None
    """The first step of this session and its time; that step includes one-time work."""

    def open(self, settings_yaml: str) -> None:
        """Create the folder, or continue the records of an interrupted stage, and write the resolved settings.

        Cuts off incomplete lines of a killed session. Raises UserError if the stage is finished.
        """
        self.check_unfinished(self.path)
        try:
            write_atomically(self.path / SETTINGS_FILE, text=settings_yaml)
        except UserError as error:
            raise UserError(f"--ckpt.output_dir: {error}") from error
        for file in (METRICS_FILE, ROLLOUTS_FILE, LEFT_OUT_FILE):
            cut_torn_line(self.path / file)
        self.started -= last_seconds(self.path / METRICS_FILE)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainings out of the folder while the block runs; raises UserError if one trains in it.

        A training on another host, to which locks may not reach, is detected by its signs of life.
        """
        output = f"--ckpt.output_dir {self.path}"
        with locked(self.path / LOCK_FILE, output=output):
            if (other := running_elsewhere(self.path)) is not None:
                raise UserError(
                    f"{output}: process {other.pid} on {other.host} is training in it; stop it, or choose another "
                    "folder"
                )
            yield

    @contextmanager
    def session(self) -> Iterator[None]:
        """Tell readers of the folder, while the block runs, that this process trains in it; see `kept_session`."""
        finished = self.path / STAGE_FILE
        with kept_session(self.path, name=self.name, kind=self.kind, finished=finished) as began:
            self._first_started = began
            yield

    @staticmethod
    def check_unfinished(path: Path) -> None:
        """Raise UserError if a folder holds a finished stage."""
        if (path / STAGE_FILE).exists():
            raise UserError(
                f"--ckpt.output_dir {path}: this stage is finished ({STAGE_FILE} is there); "
                "choose another folder, or give --ckpt.overwrite to delete it and train again"
            )

    @staticmethod
    def files(path: Path) -> list[Path]:
        """Return the files that a stage has written into its folder, without models and checkpoints."""
        return [path / name for name in (*_RECORDS, SETTINGS_FILE, STAGE_FILE) if (path / name).exists()]

    def clear_records(self) -> None:
        for name in _RECORDS:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def resume(self, step: int) -> None:
        """Cut off the records after `step`, from which the run continues: those steps are repeated."""
        before = last_seconds(self.path / METRICS_FILE)
        for file in (METRICS_FILE, ROLLOUTS_FILE):
            path = self.path / file
            lines = list(_step_lines(path))
            kept = [line.raw for at, line in lines if at <= step]
            if len(kept) < len(lines):
                write_bytes_atomically(path, data=b"".join(kept))
        self.started += before - last_seconds(self.path / METRICS_FILE)

    def logged(self, step: int, *, prefix: str) -> dict[str, float]:
        """Return the metrics of a step whose names begin with `prefix`."""
        return {
            name: value
            for at, line in _step_lines(self.path / METRICS_FILE)
            if at == step and line.record
            for name, value in line.record.items()
            if name.startswith(prefix) and isinstance(value, int | float)
        }

    def metrics(self, step: int, values: Mapping[str, object], *, held_out: bool = False) -> None:
        """Write the metrics of a step or of its evaluation, and tell the caller of the run."""
        now = time.time()
        self._first = self._first or (step, now)
        append_metrics(self.path / METRICS_FILE, step=step, seconds=now - self.started, values=values)
        callback = self.callbacks.on_evaluation if held_out else self.callbacks.on_step
        # None, which a function without a return gives, goes on.
        if callback is not None and callback(step, values) is False:
            self.ended_at = step

    def spans(self, spans: Mapping[str, tuple[float, float]], *, now: float) -> dict[str, float]:
        """Return the times at which parts of a step began and ended as metrics, in seconds since the stage started."""
        seconds = time.time() - self.started
        return {
            f"{SPAN_PREFIX}{name}_{end}": round(seconds + at - now, 3)
            for name, (began, ended) in spans.items()
            for end, at in (("began", began), ("ended", ended))
        }

    def time_left(self, step: int, *, total: int) -> str:
        """Return an estimate of the time for the remaining steps, such as `  0:02:05 left`.

        Empty if nothing is left, or if only one step was made, which is not representative.
        """
        if self._first is None or not self._first[0] < step < total:
            return ""
        first, began = self._first
        return f"  {_clock((time.time() - began) / (step - first) * (total - step))} left"

    def left_out(self, rows: Sequence[LeftOutRow]) -> None:
        """Write the rows that the run leaves out, including those that earlier sessions found during training."""
        path = self.path / LEFT_OUT_FILE
        earlier = [line.record for line in read_json_lines(path) if line.record] if path.exists() else []
        records = {_origin(record): record for record in [*map(asdict, rows), *earlier]}
        if records:
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records.values())
            write_atomically(path, text=lines)

    def leave_out(self, reason: str) -> bool:
        """Record a row that cannot be used, found during training; return whether it is a new one.

        Args:
            reason: one sentence that begins with the row's location.
        """
        found = (origin for location, origin in self.origins.items() if reason.startswith(f"{location}: "))
        dataset, index = next(found, ("", -1))
        path = self.path / LEFT_OUT_FILE
        known = {_origin(line.record) for line in read_json_lines(path) if line.record} if path.exists() else set()
        if (dataset, index) in known:
            return False
        append_json_lines(path, [asdict(LeftOutRow(dataset=dataset, index=index, reason=reason))])
        return True

    def finish(self, *, steps: int) -> str:
        """Mark the stage as finished; return what was done, and where the model is."""
        now = time.time()
        seconds = now - self.started
        first = self.started if self._first_started is None else self._first_started
        times = [datetime.fromtimestamp(at, tz=timezone.utc).isoformat(timespec="seconds") for at in (first, now)]
        stage = {"name": self.name, "kind": self.kind, "steps": steps, "seconds": round(seconds, 1)}
        write_json_object(self.path / STAGE_FILE, {**stage, "started_at": times[0], "finished_at": times[1]})
        return f"{self.name}: {steps} steps in {_clock(seconds)}; the model is in {self.path}"


def _origin(record: Mapping[str, Any]) -> tuple[str, int]:
    return record["dataset"], record["index"]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _step_lines(path: Path) -> Iterator[tuple[int, JsonLine]]:
    """Yield the lines of a file with their steps; raises UserError for a line without a step."""
    for line in read_json_lines(path) if path.exists() else ():
        record: Any = line.record
        try:
            step = int(record[STEP])
        except (ValueError, KeyError, TypeError) as error:
            shown = line.raw[:80].decode(errors="replace")
            raise UserError(f"{line.place}: not a record of a step ({shown}); repair or delete it") from error
        yield step, line


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """The name of a stage, its steps and its times."""

    name: str
    kind: str | None
    """`sft`, `dpo`, `rm` or `rl`; None if only metrics are there."""
    steps: Count
    seconds: Annotated[float, Field(ge=0, le=LARGEST_NUMBER)]
    started_at: datetime
    """The start of the first session, with a time zone; without one, derived from the metrics."""
    finished_at: datetime | None = None


def read_stage(folder: Path) -> StageSummary:
    """Return the contents of the stage.json of a run folder; raises UserError for a malformed one."""
    path = folder / STAGE_FILE
    stage = checked(StageSummary, read_json_object(path), place=str(path))
    # Times without a zone are those of this machine.
    finished = stage.finished_at and stage.finished_at.astimezone()
    return replace(stage, started_at=stage.started_at.astimezone(), finished_at=finished)


StageState = Literal["finished", "running", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Stage(StageSummary):
    folder: Path
    metrics: MetricLog
    rollouts: RolloutLog
    settings: str | None
    state: StageState
    last_sign_at: datetime | None
    """The last sign of life of a stage that runs or was stopped."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder (one stage) or a curriculum folder (one stage per folder in it)."""

    name: str
    folder: Path
    is_curriculum: bool
    stages: tuple[Stage, ...]
    evaluation: HeldOutEvaluation = field(default_factory=HeldOutEvaluation)

    @property
    def state(self) -> StageState:
        states = {stage.state for stage in self.stages}
        return "running" if "running" in states else "stopped" if "stopped" in states else "finished"

    @property
    def last_sign_at(self) -> datetime | None:
        return max((stage.last_sign_at for stage in self.stages if stage.last_sign_at), default=None)

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def legend(self) -> str:
        """Return what the short names of its stages stand for, empty if there are none."""
        names = [stage.name for stage in self.stages if stage.name in STAGE_TITLES]
        return "; ".join(f"{name}: {STAGE_TITLES[name]}" for name in names)

    def held_out(self, stage: Stage) -> dict[str, FileScores]:
        """Return the held-out scores of a stage by row file, empty if it was not evaluated."""
        checkpoint = self.checkpoint(stage)
        return checkpoint.files if checkpoint else {}

    def checkpoint(self, stage: Stage) -> EvaluatedCheckpoint | None:
        """Return the evaluated checkpoint with the stage's name, else the one with its folder's name."""
        for name in (stage.name, stage.folder.name):
            for checkpoint in self.evaluation.checkpoints:
                if checkpoint.name == name:
                    return checkpoint
        return None


def read_run(path: Path) -> Run:
    """Return the contents of a run folder or a curriculum folder."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "no such folder"
        raise UserError(f"{path}: {found}; give a run folder or a curriculum folder")
    try:
        return _read_run(path)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read ({error.strerror}); check the file") from error


def _read_run(path: Path) -> Run:
    is_stage = _holds_stage(path)
    folders = [path] if is_stage else sorted(child for child in path.iterdir() if _holds_stage(child))
    if not folders:
        raise UserError(
            f"{path}: holds no stage: neither it nor a folder in it contains {METRICS_FILE} or {STAGE_FILE}; "
            "give the output folder of a training stage, or the folder that holds the stages"
        )
    stages = sorted((_read_any_stage(folder) for folder in folders), key=lambda stage: stage.started_at)
    return Run(
        name=path.resolve().name,
        folder=path,
        is_curriculum=not is_stage,
        stages=tuple(stages),
        evaluation=read_evaluation(path / EVALUATION_FILE) if not is_stage else _evaluation_of(path, stages[0]),
    )


def note_evaluation(checkpoint: str, *, name: str, evaluation: Path) -> None:
    """Record in a run folder that an evaluation has measured its model under this name; other paths are left alone."""
    folder = Path(checkpoint)
    if not checkpoint or not _holds_stage(folder):
        return
    record: dict[str, object] = {"evaluation": os.path.relpath(evaluation, folder), "checkpoint": name}
    path = folder / EVALUATIONS_FILE
    if record not in (line.record for line in (read_json_lines(path) if path.exists() else ())):
        append_json_lines(path, [record])


def _evaluation_of(folder: Path, stage: Stage) -> HeldOutEvaluation:
    """Return the folder's own evaluation, or what others have measured of its stage; of one file of rows the last."""
    own = read_evaluation(folder / EVALUATION_FILE)
    path = folder / EVALUATIONS_FILE
    if own.checkpoints or not path.exists():
        return own
    files: dict[str, FileScores] = {}
    settings: dict[str, object] = {}
    for line in read_json_lines(path):
        if line.record is None:
            continue
        evaluation = folder / text_field(line.record, "evaluation", place=line.place)
        name = text_field(line.record, "checkpoint", place=line.place)
        found = read_evaluation(evaluation)
        measured = [checkpoint for checkpoint in found.checkpoints if checkpoint.name == name]
        if measured:
            files |= measured[0].files
            settings = found.settings
    checkpoints = (EvaluatedCheckpoint(name=stage.name, files=files),) if files else ()
    return HeldOutEvaluation(checkpoints=checkpoints, settings=settings)


def chained(runs: Sequence[Run]) -> Run | None:
    """Return runs of one stage each as one curriculum if each was trained from the one before it; None otherwise."""
    if len(runs) < 2 or any(run.is_curriculum for run in runs):
        return None
    ordered = sorted(runs, key=lambda run: run.stages[0].started_at)
    for before, run in pairwise(ordered):
        model = _trained_from(run.stages[0])
        if model is None or not _is_same_folder(model, before.folder.resolve()):
            return None
    names = [run.stages[0].name for run in ordered]
    if len(set(names)) < len(names):
        names = [run.name for run in ordered]
    stages, checkpoints = [], []
    for name, run in zip(names, ordered, strict=True):
        checkpoint = run.checkpoint(run.stages[0])
        stages.append(replace(run.stages[0], name=name))
        checkpoints += [replace(checkpoint, name=name)] if checkpoint is not None else []
    return Run(
        name=" → ".join(run.name for run in ordered),
        folder=ordered[-1].folder,
        is_curriculum=True,
        stages=tuple(stages),
        evaluation=HeldOutEvaluation(checkpoints=tuple(checkpoints), settings=ordered[-1].evaluation.settings),
    )


def _trained_from(stage: Stage) -> str | None:
    """Return the model of the stage's settings."""
    try:
        settings = yaml.load(stage.settings or "", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    sections = (settings.get(name) for name in ("actor", "model")) if isinstance(settings, dict) else ()
    models = [section.get("model_name_or_path") for section in sections if isinstance(section, dict)]
    return next((model for model in models if isinstance(model, str)), None)


def trained_reading(models: Sequence[str]) -> tuple[str | None, int | None]:
    """Return the system prompt of the last run among these models, and the most pixels of its images.

    The prompt is a shipped one's name, a text, or `none`; both are None without RL runs and prompts of other runs. A model
    is a run's folder, or one in its folder of checkpoints.
    """
    found = (Path(model).absolute() for model in reversed(models) if Path(model).is_dir())
    for file in (folder / SETTINGS_FILE for path in found for folder in (path, *path.parents[:2])):
        try:
            settings = yaml.load(file.read_text(encoding="utf-8"), yaml.SafeLoader)
            prompt, pixels = (settings["data"].get(name) for name in ("system_prompt", "max_pixels"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
            continue  # not the model of a run
        if "rollout" in settings or prompt:
            return str(prompt or NO_PROMPT), pixels if isinstance(pixels, int) else None
    return None, None


def _is_same_folder(named: str, folder: Path) -> bool:
    """Return whether a path leads to a folder; one relative to another working directory is compared by its end."""
    path = Path(named)
    if path.is_absolute() or path.exists():
        return path.resolve() == folder
    parts = [part for part in path.parts if part not in (".", "..")]
    return bool(parts) and list(folder.parts[-len(parts) :]) == parts


def _holds_stage(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (STAGE_FILE, METRICS_FILE, SESSION_FILE))


def _read_any_stage(folder: Path) -> Stage:
    metrics = read_metrics(folder / METRICS_FILE)
    settings = folder / SETTINGS_FILE
    # A stage that ends in the meantime writes stage.json before it removes the session.
    session = read_session(folder)
    state: StageState
    if (folder / STAGE_FILE).is_file():
        summary, state = read_stage(folder), "finished"
    else:
        summary = _unfinished(folder, metrics=metrics, session=session)
        state = "running" if session is not None and session.runs() else "stopped"
    return Stage(
        **vars(summary),
        folder=folder,
        metrics=metrics,
        rollouts=read_rollouts(folder / ROLLOUTS_FILE),
        settings=settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else None,
        state=state,
        last_sign_at=(
            None
            if state == "finished"
            else _utc(session.last_sign_at if session else (folder / METRICS_FILE).stat().st_mtime)
        ),
    )


def _unfinished(folder: Path, *, metrics: MetricLog, session: TrainingSession | None) -> StageSummary:
    last = metrics.rows[-1] if metrics.rows else MetricRow(step=0, seconds=None, values={})
    seconds = last.seconds or 0.0
    if session is None:
        began_at = _utc((folder / METRICS_FILE).stat().st_mtime) - timedelta(seconds=seconds)
    else:
        began_at = _utc(session.first_started_at)
    return StageSummary(
        name=session.name if session else folder.resolve().name,
        kind=session.kind if session else None,
        steps=last.step,
        seconds=seconds,
        started_at=began_at,
        finished_at=None,
    )


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)
