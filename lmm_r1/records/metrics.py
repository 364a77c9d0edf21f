"""The training metrics of one stage, read from its metrics.jsonl."""

from dataclasses import dataclass, replace
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_lines import read_json_lines
from lmm_r1.files.json_object import count_field, number_field


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
    seconds = number_field(record, "seconds", place=place)
    if seconds is not None and seconds < 0:
        raise UserError(f"{place}: seconds must be 0 or more, found {seconds}")
    return MetricRow(
        step=count_field(record, "step", place=place),
        seconds=seconds,
        values={key: number_field(record, key, place=place) for key in record if key not in ("step", "seconds")},
    )
