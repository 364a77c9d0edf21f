"""The stages of a run folder or a curriculum folder, and their held-out evaluation."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from lmm_r1.errors import UserError
from lmm_r1.records.metrics import (
    EVALUATION_FILE,
    METRICS_FILE,
    EvaluatedCheckpoint,
    FileScores,
    HeldOutEvaluation,
    MetricLog,
    MetricRow,
    read_evaluation,
    read_metrics,
)
from lmm_r1.records.rollouts import ROLLOUTS_FILE, RolloutLog, read_rollouts
from lmm_r1.records.run_folder import SETTINGS_FILE, STAGE_FILE, StageSummary, read_stage
from lmm_r1.records.session import SESSION_FILE, TrainingSession, read_session

StageState = Literal["finished", "running", "stopped", "unfinished"]
"""Unfinished is a stage of an earlier version, for which it is unknown whether it runs or was stopped."""


@dataclass(frozen=True, kw_only=True)
class Stage(StageSummary):
    """One training stage."""

    folder: Path
    metrics: MetricLog
    rollouts: RolloutLog
    settings: str | None
    """The text of run_config.yaml."""
    state: StageState
    """At the time of reading."""
    last_sign_at: datetime | None
    """The last sign of life of a stage that runs or was stopped."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder (one stage) or a curriculum folder (one stage per folder in it)."""

    name: str
    folder: Path
    is_curriculum: bool
    stages: tuple[Stage, ...]
    """In the order of their start."""
    evaluation: HeldOutEvaluation = field(default_factory=HeldOutEvaluation)

    @property
    def state(self) -> StageState:
        """The state of the whole run: finished if all of its stages are."""
        states = {stage.state for stage in self.stages}
        unfinished: tuple[StageState, ...] = ("running", "stopped", "unfinished")
        return next((state for state in unfinished if state in states), "finished")

    @property
    def last_sign_at(self) -> datetime | None:
        """The last sign of life of a run that runs or was stopped."""
        return max((stage.last_sign_at for stage in self.stages if stage.last_sign_at), default=None)

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
    """Return the contents of a run folder or a curriculum folder.

    Raises:
        UserError: the folder does not exist, holds no stage, or one of its files is malformed or cannot be read.
    """
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
    stages = sorted((_read_stage(folder) for folder in folders), key=lambda stage: stage.started_at)
    return Run(
        name=path.resolve().name,
        folder=path,
        is_curriculum=not is_stage,
        stages=tuple(stages),
        evaluation=read_evaluation(path / EVALUATION_FILE),
    )


def _holds_stage(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (STAGE_FILE, METRICS_FILE, SESSION_FILE))


def _read_stage(folder: Path) -> Stage:
    metrics = read_metrics(folder / METRICS_FILE)
    settings = folder / SETTINGS_FILE
    # A stage that ends in the meantime writes stage.json before it removes the session.
    session = read_session(folder)
    state: StageState
    if (folder / STAGE_FILE).is_file():
        summary, state = read_stage(folder), "finished"
    else:
        summary = _unfinished(folder, metrics=metrics, session=session)
        state = "unfinished" if session is None else "running" if session.runs() else "stopped"
    return Stage(
        **vars(summary),
        folder=folder,
        metrics=metrics,
        rollouts=read_rollouts(folder / ROLLOUTS_FILE),
        settings=settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else None,
        state=state,
        last_sign_at=_moment(session.last_sign_at) if session and state != "finished" else None,
    )


def _unfinished(folder: Path, *, metrics: MetricLog, session: TrainingSession | None) -> StageSummary:
    last = metrics.rows[-1] if metrics.rows else MetricRow(step=0, seconds=None, values={})
    seconds = last.seconds or 0.0
    if session is None:
        began_at = _moment((folder / METRICS_FILE).stat().st_mtime) - timedelta(seconds=seconds)
    else:
        began_at = _moment(session.first_started_at)
    return StageSummary(
        name=session.name if session else folder.resolve().name,
        kind=session.kind if session else None,
        steps=last.step,
        seconds=seconds,
        started_at=began_at,
        finished_at=None,
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)
