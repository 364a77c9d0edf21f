"""Tables of text cells: tsv, csv, xlsx and a JSON list of records, as VLMEvalKit reads and writes them."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically, write_bytes_atomically

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
