"""metrics.jsonl of a run folder: one line per step, and another for an evaluation after a step; and evaluation.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import (
    append_json_lines,
    count_field,
    last_line,
    number_field,
    read_json_lines,
    read_json_object,
    text_field,
)

METRICS_FILE = "metrics.jsonl"
STEP, SECONDS = "step", "seconds"
SPAN_PREFIX = "span/"
"""Prefix of the metrics with the times at which a part of a step began and ended."""

StepCallback: TypeAlias = Callable[[int, Mapping[str, object]], object]
"""Takes a step and its metrics; False ends the run after this step, as at its last one."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What a caller wants to be told while a run goes on, in the process that writes the records."""

    on_step: StepCallback | None = None
    on_evaluation: StepCallback | None = None


NO_CALLBACKS = Callbacks()


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    step: int
    seconds: float | None
    """Since the stage started."""
    values: dict[str, float | None]
    """By metric; None if the logged number was not finite."""


@dataclass(frozen=True, kw_only=True)
class MetricLog:
    """One row per step, in the order of steps."""

    rows: tuple[MetricRow, ...] = ()
    torn_lines: int = 0
    repeated_steps: int = 0
    """Steps logged more than once, as after a resume; the last row of a step is kept."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def series(self, name: str) -> list[tuple[int, float | None]]:
        """Return (step, value) of one metric, for the steps that logged it."""
        return [(row.step, row.values[name]) for row in self.rows if name in row.values]


def append_metrics(path: Path, *, step: int, seconds: float, values: Mapping[str, object]) -> None:
    """Append the metrics of a step; values that are not numbers are left out."""
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    append_json_lines(path, [{STEP: step, SECONDS: round(seconds, 3), **numbers}])


def last_seconds(path: Path) -> float:
    """Return the seconds of a file's last line, 0 if there is none; raises UserError for another kind of line."""
    line = last_line(path)
    if not line:
        return 0.0
    try:
        return float(json.loads(line)[SECONDS])
    except (ValueError, KeyError, TypeError) as error:
        shown = line.decode(errors="replace").strip()[:80]
        raise UserError(f"{path}: the last line holds no metrics ({shown}); repair or delete it") from error


def read_metrics(path: Path) -> MetricLog:
    """Return the metrics in a file, none if it does not exist; raises UserError, with the line, for a malformed one."""
    if not path.exists():
        return MetricLog()
    rows: dict[int, MetricRow] = {}
    torn, repeated = 0, set()
    newest: MetricRow | None = None
    for line in read_json_lines(path):
        if line.record is None:
            torn += 1
            continue
        row = _metric_row(line.record, place=line.place)
        before = rows.get(row.step)
        if before is not None and before is newest and row.values and not before.values.keys() & row.values.keys():
            # An evaluation during training adds a second line to the step just logged.
            row = replace(before, values=before.values | row.values)
        elif before is not None:
            repeated.add(row.step)
        newest = rows[row.step] = row
    ordered = tuple(rows[step] for step in sorted(rows))
    return MetricLog(rows=ordered, torn_lines=torn, repeated_steps=len(repeated))


def _metric_row(record: dict[str, object], *, place: str) -> MetricRow:
    seconds = number_field(record, SECONDS, place=place)
    if seconds is not None and seconds < 0:
        raise UserError(f"{place}: seconds must be 0 or more, found {seconds}")
    return MetricRow(
        step=count_field(record, STEP, place=place),
        seconds=seconds,
        values={key: number_field(record, key, place=place) for key in record if key not in (STEP, SECONDS)},
    )


EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class FileScores:
    """One checkpoint on one file of held-out rows; shares are between 0 and 1."""

    rows: int
    accuracy: float | None
    format: float | None
    mean_response_tokens: float | None
    truncated_rate: float | None


@dataclass(frozen=True, kw_only=True)
class EvaluatedCheckpoint:
    name: str
    files: dict[str, FileScores]
    """By the name of the row file: `text` and `image` in a curriculum."""


@dataclass(frozen=True, kw_only=True)
class HeldOutEvaluation:
    """The contents of an evaluation.json; no checkpoints if there is no such file."""

    checkpoints: tuple[EvaluatedCheckpoint, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def file_names(self) -> list[str]:
        return text_first(name for checkpoint in self.checkpoints for name in checkpoint.files)


def text_first(names: Iterable[str]) -> list[str]:
    """Return the distinct names: `text`, then `image`, then the others in the order of first occurrence."""
    found = list(dict.fromkeys(names))
    first = [name for name in ("text", "image") if name in found]
    return [*first, *(name for name in found if name not in first)]


def read_evaluation(path: Path) -> HeldOutEvaluation:
    """Return the evaluation in a file, an empty one if there is none; raises UserError for a malformed one."""
    if not path.exists():
        return HeldOutEvaluation()
    record = read_json_object(path)
    settings = record.get("settings", {})
    checkpoints = record.get("checkpoints")
    if not isinstance(checkpoints, list) or not all(isinstance(checkpoint, dict) for checkpoint in checkpoints):
        raise UserError(f"{path}: checkpoints must be a list of objects; evaluate again")
    return HeldOutEvaluation(
        checkpoints=tuple(
            _checkpoint(checkpoint, place=f"{path}, checkpoint {number}")
            for number, checkpoint in enumerate(checkpoints, start=1)
        ),
        settings=settings if isinstance(settings, dict) else {},
    )


def _checkpoint(record: dict[str, object], *, place: str) -> EvaluatedCheckpoint:
    files = record.get("files")
    if not isinstance(files, dict) or not all(isinstance(scores, dict) for scores in files.values()):
        raise UserError(f"{place}: files must be an object of scores by row file; evaluate again")
    return EvaluatedCheckpoint(
        name=text_field(record, "name", place=place),
        files={name: _file_scores(scores, place=f"{place}, {name}") for name, scores in files.items()},
    )


def _file_scores(record: dict[str, object], *, place: str) -> FileScores:
    return FileScores(
        rows=count_field(record, "rows", place=place),
        accuracy=_share(record, "accuracy", place=place),
        format=_share(record, "format", place=place),
        mean_response_tokens=number_field(record, "mean_response_tokens", place=place),
        truncated_rate=_share(record, "truncated_rate", place=place),
    )


def _share(record: dict[str, object], key: str, *, place: str) -> float | None:
    value = number_field(record, key, place=place)
    if value is not None and not 0 <= value <= 1:
        raise UserError(f"{place}: {key} must be between 0 and 1, found {value}")
    return value
