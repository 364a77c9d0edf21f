"""metrics.jsonl of a run folder: a line per step, and one more for an evaluation after a step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import append_json_lines, count_field, last_line, number_field, read_json_lines

METRICS_FILE = "metrics.jsonl"
STEP, SECONDS = "step", "seconds"
SPAN_PREFIX = "span/"
"""Of metrics that say when a part of a step began or ended."""


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """What was logged at one step."""

    step: int
    seconds: float | None
    """Since the stage started."""
    values: dict[str, float | None]
    """By metric; None where the logged number was not finite."""


@dataclass(frozen=True, kw_only=True)
class MetricLog:
    """One row per step, in the order of steps."""

    rows: tuple[MetricRow, ...] = ()
    torn_lines: int = 0
    repeated_steps: int = 0
    """Steps logged again, as after a resume; the last row of a step is the one kept."""

    @property
    def names(self) -> list[str]:
        """Every metric that occurs, in the order of first occurrence."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def series(self, name: str) -> list[tuple[int, float | None]]:
        """Return (step, value) of one metric; steps that did not log it are left out."""
        return [(row.step, row.values[name]) for row in self.rows if name in row.values]


def append_metrics(path: Path, *, step: int, seconds: float, values: Mapping[str, object]) -> None:
    """Append the metrics of a step; values that are not numbers are left out."""
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    append_json_lines(path, [{STEP: step, SECONDS: round(seconds, 3), **numbers}])


def last_seconds(path: Path) -> float:
    """Return the seconds of the last line of a file, 0 where there is none; another kind of line is a UserError."""
    line = last_line(path)
    if not line:
        return 0.0
    try:
        return float(json.loads(line)[SECONDS])
    except (ValueError, KeyError, TypeError) as error:
        shown = line.decode(errors="replace").strip()[:80]
        raise UserError(f"{path}: the last line holds no metrics ({shown}); repair or delete it") from error


def read_metrics(path: Path) -> MetricLog:
    """Return the metrics in a file, none if the file does not exist; a malformed line is a UserError naming it."""
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
            # An evaluation during training adds a line of its own to the step just logged.
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
