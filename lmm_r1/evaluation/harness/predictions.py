"""The predictions of another harness: VLMEvalKit's tables and lmms-eval's samples become the same rows."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.image_sources import ImageSource
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically, write_bytes_atomically

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


TABLE_SUFFIXES = (".xlsx", ".tsv", ".csv", ".json")
MAX_CELL_CHARS = 32_767
"""Of a cell in xlsx; what is longer is lost there without a word."""
# What a sheet cannot hold, or would give back changed: control characters, carriage returns, escapes such as _x000D_.
_NOT_IN_SHEETS = re.compile(r"[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]|_x[0-9A-Fa-f]{4}_")
_NOT_IN_TEXT = re.compile(r"[\x00\ud800-\udfff]")


def read_table(path: Path) -> list[dict[str, object]]:
    """Return the rows of a table by column, cells as the file has them; raises UserError where it is no table."""
    if not path.is_file():
        raise UserError(f"no file {path}; check the path")
    try:
        rows = {".xlsx": _read_xlsx, ".tsv": _read_tsv, ".csv": _read_csv, ".json": _read_json}[path.suffix](path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from error
    if not rows:
        raise UserError(f"{path} holds no rows; check the path")
    return rows


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows that all have the same columns, in the form of the suffix.

    Raises:
        UserError: a cell does not fit into the form (the message names one that takes it), or nothing can be written.
    """
    if path.suffix == ".json":
        # Beyond ASCII as escapes: that holds half of a surrogate pair, too, which a model may have written.
        write_atomically(path, text=json.dumps(list(map(dict, rows)), indent=4) + "\n")
    elif path.suffix == ".tsv":
        _check_cells(path, rows, pattern=_NOT_IN_TEXT, longest=None, instead="write .json")
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, delimiter="\t", quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows(row.values() for row in rows)
        write_bytes_atomically(path, data=buffer.getvalue().encode())
    else:
        assert path.suffix == ".xlsx", "the caller knows the forms"
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
                raise UserError(f"{path} row {number}: {name} holds {found[0]!r}, which this form cannot; {instead}")
            if longest is not None and len(value) > longest:
                raise UserError(
                    f"{path} row {number}: {name} has {len(value):,} characters, and a cell takes {longest:,}; {instead}"
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
                # A prediction that begins with = is no formula, and #N/A no error.
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
        # Not data_only: what is stored as a formula is a prediction that begins with =, and has no value.
        book = openpyxl.load_workbook(path, read_only=True)
        lines = [list(line) for line in book.worksheets[0].iter_rows(values_only=True)]
        book.close()
    except (InvalidFileException, zipfile.BadZipFile, KeyError, IndexError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a readable xlsx file ({error})") from error
    return _rows(lines)


def _read_tsv(path: Path) -> list[dict[str, object]]:
    return _read_separated(path, delimiter="\t")


def _read_csv(path: Path) -> list[dict[str, object]]:
    return _read_separated(path, delimiter=",")


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
            raise UserError(f"{path} row {number}: {len(line)} cells where the table has {width} columns; repair it")
    return _rows(lines)


def _read_json(path: Path) -> list[dict[str, object]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise UserError(f"{path}: a list of objects is needed, one per row")
    return content


def _rows(lines: Sequence[list[object]]) -> list[dict[str, object]]:
    """Rows by the names in the first line; a sheet leaves out empty cells at the end of a line, and whole lines."""
    if not lines:
        return []
    # A column without a name, such as the one that pandas makes of its row numbers, is left out.
    names = {place: str(name) for place, name in enumerate(lines[0]) if name is not None}
    filled = (line for line in lines[1:] if any(cell is not None for cell in line))
    return [{name: line[place] if place < len(line) else None for place, name in names.items()} for line in filled]
