"""stage.json of a run folder, which makes it that of a finished stage: what the stage took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import count_field, number_field, read_json_object, text_field, write_json_object

STAGE_FILE = "stage.json"
SETTINGS_FILE = "run_config.yaml"


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """What a stage is called, and what it took."""

    name: str
    kind: str | None
    """`sft` or `rl`; None while the stage runs."""
    steps: int
    seconds: float
    started_at: datetime
    """With a time zone; while the stage runs, reckoned from its newest metrics row."""
    finished_at: datetime | None
    """None while the stage runs."""


def write_stage(folder: Path, *, name: str, kind: str, steps: int, started: float, finished: float) -> None:
    """Write the stage.json of a run folder.

    Args:
        started: seconds since the epoch, as `finished`.
    """
    stage = StageSummary(
        name=name,
        kind=kind,
        steps=steps,
        seconds=round(finished - started, 1),
        started_at=datetime.fromtimestamp(started, tz=timezone.utc),
        finished_at=datetime.fromtimestamp(finished, tz=timezone.utc),
    )
    write_json_object(
        folder / STAGE_FILE,
        {
            field: value.isoformat(timespec="seconds") if isinstance(value, datetime) else value
            for field, value in asdict(stage).items()
        },
    )


def read_stage(folder: Path) -> StageSummary:
    """Return what the stage.json of a run folder says; raises UserError for one that is malformed."""
    path = folder / STAGE_FILE
    record = read_json_object(path)
    seconds = number_field(record, "seconds", place=str(path))
    if seconds is None or seconds < 0:
        raise UserError(f"{path}: seconds must be a number from 0 up, found {record.get('seconds')!r}")
    return StageSummary(
        name=text_field(record, "name", place=str(path)),
        kind=text_field(record, "kind", place=str(path)),
        steps=count_field(record, "steps", place=str(path)),
        seconds=seconds,
        started_at=_moment(record, "started_at", place=str(path)),
        finished_at=_moment(record, "finished_at", place=str(path)),
    )


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
