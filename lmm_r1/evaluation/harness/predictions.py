"""Rows of predictions, into which VLMEvalKit's tables and lmms-eval's samples are converted."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from lmm_r1.data.messages import ImageSource
from lmm_r1.data.reading import SkippedRow
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically, write_bytes_atomically

Harness = Literal["VLMEvalKit", "lmms-eval"]
FAILED_REQUEST = "Failed to obtain answer"
"""The beginning of VLMEvalKit's prediction if a request failed."""
MAX_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """One row of a benchmark, and a model's responses to it."""

    key: str
    """VLMEvalKit's `index`, lmms-eval's `doc_id`."""
    location: str
    question: str
    label: str
    responses: tuple[str, ...]
    """As they were judged there: after lmms-eval's filters."""
    theirs: float | None = None
    """The file's own verdict, from 0 to 1; None if it has none."""
    datasource: str
    """The category, or else the name of the file."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The text of each option by its letter."""
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A file of predictions."""

    path: Path
    harness: Harness
    metric: str | None
    """The field of the file's own verdicts; None if it has none."""
    rows: Mapping[int, PredictedRow]
    """By their index in the file."""
    skipped: tuple[SkippedRow, ...]
    notes: tuple[str, ...]
    """What the user should know about the file, in sentences."""


Record = dict[str, object]
"""The columns of a table's row, or the fields of a sample."""


def find_metric(
    records: Sequence[Record], *, path: Path, wanted: str | None, names: Sequence[str], sole: bool
) -> tuple[str | None, list[str]]:
    """Return the field of the records' own verdicts, None if there is none, and notes on rejected fields.

    Args:
        wanted: the field that the user named, with dots into objects.
        names: the candidate fields, the most likely first.
        sole: raise an error if several fit, instead of taking the first.

    Raises:
        UserError: the wanted field is missing or holds no verdicts, or there are several to choose from.
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
            notes.append(f"{path}: {name} is not a verdict, because the file {wrong}")
    if sole and len(fit) > 1:
        raise UserError(f"{path} has several verdicts, {_listed(fit)}: choose one with --rejudge_metric")
    return (fit[0] if fit else None), ([] if fit else notes)


def verdict(record: Record, name: str) -> float | None:
    """Return the number at a dotted name; None if there is none, or a text that is not a number."""
    value = dotted(record, name)
    if isinstance(value, str):
        try:
            number = {"true": 1.0, "false": 0.0}.get(value.strip().lower())
            value = float(value) if number is None else number
        except ValueError:
            return None
    return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None


def dotted(record: Record, name: str) -> object:
    """Return the value at `name`, in which dots lead into objects; None if there is none."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first)
    return dotted(inner, rest) if dot and isinstance(inner, dict) else None


def _unfit(records: Sequence[Record], name: str) -> str | None:
    """Return why these are not verdicts from 0 to 1, None if they are."""
    values = [verdict(record, name) for record in records]
    known = [value for value in values if value is not None]
    if not known:
        return "has no numbers there"
    worst = next((value for value in known if not 0 <= value <= 1), None)
    return None if worst is None else f"has {worst:g} there, which is not from 0 to 1"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED])


def shown(value: object) -> str:
    """Return a cell as text: "" for an empty one, and a whole number without the point that tables may add."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | list) else str(value)


def good_rows(
    parsed: Iterator[tuple[int, PredictedRow | str]],
) -> tuple[dict[int, PredictedRow], tuple[SkippedRow, ...]]:
    """Return the valid rows by index, and the others, which are given as the reason why they cannot be used."""
    rows: dict[int, PredictedRow] = {}
    skipped: list[SkippedRow] = []
    for index, row in parsed:
        if isinstance(row, str):
            skipped.append(SkippedRow(index=index, reason=row))
        else:
            rows[index] = row
    return rows, tuple(skipped)


TABLE_SUFFIXES = (".xlsx", ".tsv", ".csv", ".json")
MAX_CELL_CHARS = 32_767
"""The limit of a cell in xlsx, which silently drops the rest."""
# What a sheet cannot hold or would change: control characters, carriage returns, escapes such as _x000D_.
_NOT_IN_SHEETS = re.compile(r"[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]|_x[0-9A-Fa-f]{4}_")
_NOT_IN_TEXT = re.compile(r"[\x00\ud800-\udfff]")


def read_table(path: Path) -> list[dict[str, object]]:
    """Return the rows of a table as columns by name, with unchanged cells; raises UserError if it is not a table."""
    if not path.is_file():
        raise UserError(f"no file {path}; check the path")
    try:
        rows = _READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from error
    if not rows:
        raise UserError(f"{path} holds no rows; check the path")
    return rows


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows that all have the same columns, in the format of the suffix.

    Raises:
        UserError: a cell does not fit the format (the message names one that it fits), or nothing can be written.
    """
    if path.suffix == ".json":
        # Escape all characters beyond ASCII, which also works for a lone surrogate from a model.
        write_atomically(path, text=json.dumps(list(map(dict, rows)), indent=4) + "\n")
    elif path.suffix == ".tsv":
        _check_cells(path, rows, pattern=_NOT_IN_TEXT, longest=None, instead="write .json")
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, delimiter="\t", quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows(row.values() for row in rows)
        write_bytes_atomically(path, data=buffer.getvalue().encode())
    else:
        assert path.suffix == ".xlsx", "the caller checks the suffix"
        instead = "write .tsv or .json (PRED_FORMAT=tsv in VLMEvalKit)"
        _check_cells(path, rows, pattern=_NOT_IN_SHEETS, longest=MAX_CELL_CHARS, instead=instead)
        write_bytes_atomically(path, data=_sheet(rows))


def _check_cells(
    path: Path, rows: Sequence[Mapping[str, object]], *, pattern: re.Pattern[str], longest: int | None, instead: str
) -> None:
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            if not isinstance(value, str):
                continue
            found = pattern.search(value)
            if found:
                raise UserError(f"{path} row {number}: {name} holds {found[0]!r}, which this format cannot; {instead}")
            if longest is not None and len(value) > longest:
                raise UserError(
                    f"{path} row {number}: {name} has {len(value):,} characters, more than the {longest:,} of a cell; {instead}"
                )


def _sheet(rows: Sequence[Mapping[str, object]]) -> bytes:
    import openpyxl
    from openpyxl.cell import WriteOnlyCell

    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("Sheet1")
    sheet.append(list(rows[0]))
    for row in rows:
        cells = []
        for value in row.values():
            cell = WriteOnlyCell(sheet, value=value)
            if isinstance(value, str):
                # A prediction that begins with = is not a formula, and #N/A not an error.
                cell.data_type = "s"
            cells.append(cell)
        sheet.append(cells)
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def _read_xlsx(path: Path) -> list[dict[str, object]]:
    import openpyxl
    from openpyxl.utils.exceptions import InvalidFileException

    try:
        # Without data_only: a prediction that begins with = was stored as a formula and has no value.
        book = openpyxl.load_workbook(path, read_only=True)
        lines = [list(line) for line in book.worksheets[0].iter_rows(values_only=True)]
        book.close()
    except (InvalidFileException, zipfile.BadZipFile, KeyError, IndexError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a readable xlsx file ({error})") from error
    return _rows(lines)


def _read_separated(path: Path, *, delimiter: str) -> list[dict[str, object]]:
    # A cell may hold an image.
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        try:
            lines: list[list[object]] = [list(line) for line in csv.reader(stream, delimiter=delimiter) if line]
        except csv.Error as error:
            raise UserError(f"{path}: not a readable table ({error})") from error
    width = len(lines[0]) if lines else 0
    for number, line in enumerate(lines[1:], start=1):
        if len(line) != width:
            raise UserError(f"{path} row {number}: {len(line)} cells, but the table has {width} columns; repair it")
    return _rows(lines)


def _read_json(path: Path) -> list[dict[str, object]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise UserError(f"{path}: must be a list of objects, one per row")
    return content


def _rows(lines: Sequence[list[object]]) -> list[dict[str, object]]:
    """Return rows by the names in the first line; sheets omit empty cells at the end of a line, and empty lines."""
    if not lines:
        return []
    # Leave out a column without a name, such as pandas' row numbers.
    names = {place: str(name) for place, name in enumerate(lines[0]) if name is not None}
    filled = (line for line in lines[1:] if any(cell is not None for cell in line))
    return [{name: line[place] if place < len(line) else None for place, name in names.items()} for line in filled]


_READERS: dict[str, Callable[[Path], list[dict[str, object]]]] = {
    ".xlsx": _read_xlsx,
    ".tsv": partial(_read_separated, delimiter="\t"),
    ".csv": partial(_read_separated, delimiter=","),
    ".json": _read_json,
}
