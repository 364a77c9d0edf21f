"""metrics.jsonl of a run folder: one line per step, and another for an evaluation after a step; and evaluation.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import (
    Count,
    Number,
    append_json_lines,
    checked,
    count_field,
    last_line,
    number_field,
    read_json_lines,
    read_json_object,
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
    return MetricLog(rows=tuple(rows[step] for step in sorted(rows)), torn_lines=torn, repeated_steps=len(repeated))


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
Share = Annotated[Number, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class FileScores:
    """One checkpoint on one file of held-out rows; shares are between 0 and 1."""

    rows: Count
    accuracy: Share = None
    format: Share = None
    mean_response_tokens: Number = None
    truncated_rate: Share = None


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
    return (
        checked(HeldOutEvaluation, read_json_object(path), place=str(path)) if path.exists() else HeldOutEvaluation()
    )
