"""The predictions of another harness: VLMEvalKit's tables and lmms-eval's samples become the same rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.image_sources import ImageSource
from lmm_r1.errors import UserError

Harness = Literal["VLMEvalKit", "lmms-eval"]
FAILED_REQUEST = "Failed to obtain answer"
"""How the prediction begins that VLMEvalKit writes where no answer came."""
MAX_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """One row of a benchmark, and what a model said to it."""

    key: str
    """VLMEvalKit's `index`, lmms-eval's `doc_id`."""
    location: str
    question: str
    label: str
    responses: tuple[str, ...]
    """As they were judged there: behind lmms-eval's filters."""
    theirs: float | None = None
    """The file's own verdict from 0 to 1; None where it has none."""
    datasource: str
    """The category, else the name of the file."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The text of each option by its letter."""
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A file of predictions."""

    path: Path
    harness: Harness
    metric: str | None
    """Where the file's own verdicts are from; None where it has none."""
    rows: Mapping[int, PredictedRow]
    """By their place in the file."""
    skipped: tuple[SkippedRow, ...]
    notes: tuple[str, ...]
    """What the user should know of the file, in sentences."""


Record = dict[str, object]
"""The columns of a table's row, or the fields of a sample."""


def find_metric(
    records: Sequence[Record], *, path: Path, wanted: str | None, names: Sequence[str], sole: bool
) -> tuple[str | None, list[str]]:
    """Return where the records' own verdicts stand, None where nowhere, and notes on what was passed over.

    Args:
        wanted: what the user named, with dots into objects.
        names: where they may stand, the likeliest first.
        sole: raise an error where there are several, and not take the first.

    Raises:
        UserError: the wanted one is missing or holds no verdicts, or there are several to choose from.
    """
    if wanted is not None:
        wrong = _unfit(records, wanted)
        if wrong is not None:
            raise UserError(f"--rejudge_metric {wanted}: {path} {wrong}; it may be {_listed(names) or 'none'}")
        return wanted, []
    fit, notes = [], []
    for name in names:
        wrong = _unfit(records, name)
        if wrong is None:
            fit.append(name)
        else:
            notes.append(f"{path}: {name} is no verdict, as the file {wrong}")
    if sole and len(fit) > 1:
        raise UserError(f"{path} has several verdicts, {_listed(fit)}: choose one with --rejudge_metric")
    return (fit[0] if fit else None), ([] if fit else notes)


def verdict(record: Record, name: str) -> float | None:
    """Return the number at a dotted name; None where there is none, or where it is a text without one."""
    value = dotted(record, name)
    if isinstance(value, str):
        try:
            number = {"true": 1.0, "false": 0.0}.get(value.strip().lower())
            value = float(value) if number is None else number
        except ValueError:
            return None
    return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None


def dotted(record: Record, name: str) -> object:
    """Return the value at `name`, which may lead into objects with dots; None where there is none."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first)
    return dotted(inner, rest) if dot and isinstance(inner, dict) else None


def _unfit(records: Sequence[Record], name: str) -> str | None:
    """Why these are no verdicts from 0 to 1, or None where they are."""
    values = [verdict(record, name) for record in records]
    known = [value for value in values if value is not None]
    if not known:
        return "has no numbers there"
    worst = next((value for value in known if not 0 <= value <= 1), None)
    return None if worst is None else f"has {worst:g} there, which is not from 0 to 1"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED])


def shown(value: object) -> str:
    """Return a cell as text: "" for an empty one, and a whole number without the point that a table may give it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | list) else str(value)


def good_rows(
    parsed: Iterator[tuple[int, PredictedRow | str]],
) -> tuple[dict[int, PredictedRow], tuple[SkippedRow, ...]]:
    """Return the rows by their place, and those of which only the reason is there that they cannot be used."""
    rows: dict[int, PredictedRow] = {}
    skipped: list[SkippedRow] = []
    for index, row in parsed:
        if isinstance(row, str):
            skipped.append(SkippedRow(index=index, reason=row))
        else:
            rows[index] = row
    return rows, tuple(skipped)
