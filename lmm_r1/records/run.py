"""What a run left behind: the stages of a run folder or a curriculum folder, and their held-out evaluation."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_object import count_field, number_field, read_json_object, text_field
from lmm_r1.records.evaluation import Checkpoint, Evaluation, FileScores, read_evaluation
from lmm_r1.records.metrics import MetricLog, MetricRow, read_metrics
from lmm_r1.records.rollouts import Rollout, RolloutLog, read_rollouts

__all__ = ["Checkpoint", "Evaluation", "FileScores", "MetricLog", "Rollout", "RolloutLog", "Run", "Stage", "read_run"]

STAGE_FILE = "stage.json"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
SETTINGS_FILE = "run_config.yaml"
EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One training stage, finished or still running."""

    name: str
    kind: str | None
    """`sft` or `rl`; None while the stage runs."""
    folder: Path
    steps: int
    seconds: float
    started_at: datetime
    """With a time zone; while the stage runs, reckoned from its newest metrics row."""
    finished_at: datetime | None
    """None while the stage runs."""
    metrics: MetricLog
    rollouts: RolloutLog
    settings: str | None
    """The text of run_config.yaml."""

    @property
    def running(self) -> bool:
        """Whether the stage has metrics but no stage.json yet."""
        return self.finished_at is None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder (one stage) or a curriculum folder (one stage per folder in it)."""

    name: str
    folder: Path
    is_curriculum: bool
    stages: tuple[Stage, ...]
    """In the order in which they were started."""
    evaluation: Evaluation = field(default_factory=Evaluation)

    def held_out(self, stage: Stage) -> dict[str, FileScores]:
        """Return the held-out scores of a stage by row file, empty where it was not evaluated."""
        checkpoint = self.checkpoint(stage)
        return checkpoint.files if checkpoint else {}

    def checkpoint(self, stage: Stage) -> Checkpoint | None:
        """Return the evaluated checkpoint that carries the stage's name, else the one with its folder's name."""
        for name in (stage.name, stage.folder.name):
            for checkpoint in self.evaluation.checkpoints:
                if checkpoint.name == name:
                    return checkpoint
        return None


def read_run(path: Path) -> Run:
    """Return what a run folder or a curriculum folder holds.

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
            f"{path}: holds no stage: there is neither {METRICS_FILE} nor {STAGE_FILE} in it or in a folder in it; "
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
    return (folder / STAGE_FILE).is_file() or (folder / METRICS_FILE).is_file()


def _read_stage(folder: Path) -> Stage:
    metrics = read_metrics(folder / METRICS_FILE)
    settings = folder / SETTINGS_FILE
    about = _finished(folder / STAGE_FILE) if (folder / STAGE_FILE).is_file() else _running(folder, metrics=metrics)
    return Stage(
        **about,
        folder=folder,
        metrics=metrics,
        rollouts=read_rollouts(folder / ROLLOUTS_FILE),
        settings=settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else None,
    )


def _finished(path: Path) -> dict[str, object]:
    record = read_json_object(path)
    seconds = number_field(record, "seconds", place=str(path))
    if seconds is None or seconds < 0:
        raise UserError(f"{path}: seconds must be a number from 0 up, found {record.get('seconds')!r}")
    return {
        "name": text_field(record, "name", place=str(path)),
        "kind": text_field(record, "kind", place=str(path)),
        "steps": count_field(record, "steps", place=str(path)),
        "seconds": seconds,
        "started_at": _moment(record, "started_at", place=str(path)),
        "finished_at": _moment(record, "finished_at", place=str(path)),
    }


def _running(folder: Path, *, metrics: MetricLog) -> dict[str, object]:
    last = metrics.rows[-1] if metrics.rows else MetricRow(step=0, seconds=None, values={})
    seconds = last.seconds or 0.0
    written_at = datetime.fromtimestamp((folder / METRICS_FILE).stat().st_mtime, tz=timezone.utc)
    return {
        "name": folder.resolve().name,
        "kind": None,
        "steps": last.step,
        "seconds": seconds,
        "started_at": written_at - timedelta(seconds=seconds),
        "finished_at": None,
    }


def _moment(record: dict[str, object], key: str, *, place: str) -> datetime:
    text = text_field(record, key, place=place)
    try:
        # Before Python 3.11, fromisoformat does not know the suffix Z.
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise UserError(
            f"{place}: {key} must be an ISO 8601 time like 2026-01-31T12:00:00+00:00, found {text!r}"
        ) from error
    return moment if moment.tzinfo else moment.astimezone()
