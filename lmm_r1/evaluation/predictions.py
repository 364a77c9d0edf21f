"""Predictions in the files of VLMEvalKit and lmms-eval, read as rows of one form, and tables of them."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import re
import string
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
from lmm_r1.files.json_files import read_json_lines

Harness = Literal["VLMEvalKit", "lmms-eval"]
FAILED_REQUEST = "Failed to obtain answer"
"""The beginning of VLMEvalKit's prediction if a request failed."""
MAX_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """One row of a benchmark, and a model's responses to it."""

    key: str
    location: str
    question: str
    label: str
    responses: tuple[str, ...]
    """As they were judged there: after lmms-eval's filters."""
    theirs: float | None = None
    """The file's own verdict, from 0 to 1; None if it has none."""
    datasource: str
    options: Mapping[str, str] = field(default_factory=dict)
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Predictions:
    path: Path
    harness: Harness
    metric: str | None
    """The field of the file's own verdicts; None if it has none."""
    rows: Mapping[int, PredictedRow]
    skipped: tuple[SkippedRow, ...]
    notes: tuple[str, ...]


Record = dict[str, object]
"""The columns of a table's row, or the fields of a sample."""


def find_metric(
    records: Sequence[Record], *, path: Path, wanted: str | None, names: Sequence[str], sole: bool
) -> tuple[str | None, list[str]]:
    """Return the field of the records' own verdicts, None if there is none, and notes on rejected fields."""
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
    """Write rows that all have the same columns, in the format of the suffix."""
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


# The fields of a sample other than its metrics, in all releases.
FIELDS = frozenset(
    (
        *("doc_id", "doc", "target", "arguments", "input", "input_media", "resps", "filtered_resps", "filter"),
        *("doc_hash", "prompt_hash", "target_hash", "token_counts", "metrics"),
    )
)
_LIKELIHOOD = re.compile(r"-?(?:\d+\.\d+(?:e[+-]?\d+)?|inf)")
_DATE = re.compile(r"^\d[\d_\-T:.]*_samples_|^samples_")


def is_lmms_eval(record: Record) -> bool:
    return "doc_id" in record and ("filtered_resps" in record or "resps" in record)


def lmms_eval_predictions(path: Path, records: Sequence[Record], *, metric: str | None) -> Predictions:
    """Return the rows of a file of samples.

    Rows without a target, and rows that compare likelihoods without a response, are left out.
    """
    names = list(dict.fromkeys(name for record in records for name in _numbers(record)))
    found, notes = find_metric(records, path=path, wanted=metric, names=names, sole=True)
    rows, skipped = good_rows(_lmms_eval_rows(path, records, metric=found))
    return Predictions(path=path, harness="lmms-eval", metric=found, rows=rows, skipped=skipped, notes=tuple(notes))


def _numbers(record: Record, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of possible verdicts: numbers and booleans outside of the known fields."""
    for name, value in record.items():
        if isinstance(value, bool | int | float) and (prefix or name not in FIELDS):
            yield f"{prefix}{name}"
        elif isinstance(value, dict) and not prefix and name not in FIELDS:
            # Inside an object only booleans count: it often holds ids and numbers of the question, too.
            yield from (f"{name}.{inner}" for inner, said in value.items() if isinstance(said, bool))


def _lmms_eval_rows(
    path: Path, records: Sequence[Record], *, metric: str | None
) -> Iterator[tuple[int, PredictedRow | str]]:
    task = _DATE.sub("", path.stem)
    for place, record in enumerate(records):
        location = f"{path} line {place + 1}"
        label = shown(record.get("target")).strip()
        responses = _responses(record.get("filtered_resps", record.get("resps")))
        if not label:
            yield place, f"{location}: the target is empty, so there is nothing to compare with"
        elif responses is None:
            yield place, f"{location}: the sample holds likelihoods but no response, so there is nothing to judge"
        else:
            yield place, PredictedRow(
                key=shown(record.get("doc_id")),
                location=location,
                question=_question(record),
                label=label,
                responses=responses,
                theirs=None if metric is None else verdict(record, metric),
                datasource=task,
                images=_lmms_eval_images(record),
            )


def _responses(value: object) -> tuple[str, ...] | None:
    """Return the texts of `"text"`, `["text", ...]` or `[["text", ...], ...]`; None for (likelihood, bool) pairs."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        return None
    texts: list[str] = []
    for item in value:
        inner = item if isinstance(item, list) else [item]
        if len(inner) == 2 and _LIKELIHOOD.fullmatch(str(inner[0])) and str(inner[1]) in ("True", "False"):
            return None
        if not all(isinstance(text, str) for text in inner):
            return None
        texts += inner
    return tuple(texts)


def _question(record: Record) -> str:
    if isinstance(record.get("input"), str):
        return str(record["input"])
    arguments = record.get("arguments")
    # [[prompt, settings, ...]], or {"gen_args_0": {"arg_0": prompt}}.
    while isinstance(arguments, list | dict) and arguments:
        arguments = arguments[0] if isinstance(arguments, list) else next(iter(arguments.values()))
    if isinstance(arguments, str):
        return arguments
    doc = record.get("doc")
    return shown(doc.get("question")) if isinstance(doc, dict) else ""


def _lmms_eval_images(record: Record) -> tuple[str, ...]:
    media = record.get("input_media")
    return tuple(item for item in media if isinstance(item, str)) if isinstance(media, list) else ()


def lmms_eval_sample(
    *,
    doc_id: int,
    doc: Mapping[str, object],
    prompt: str,
    target: str,
    settings: Mapping[str, object],
    responses: Sequence[str],
    metrics: Mapping[str, float],
) -> Record:
    """Return one sample with the fields of all releases and one request per response."""
    return {
        "doc_id": doc_id,
        "doc": dict(doc),
        "target": target,
        "arguments": [[prompt, dict(settings)]],
        "input": prompt,
        "resps": [[response] for response in responses],
        "filtered_resps": list(responses),
        "doc_hash": _hash(json.dumps(dict(doc), indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(target),
        **metrics,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


LETTERS = string.ascii_uppercase
METRICS = ("hit", "score", "correct")
"""Columns that an evaluation adds, the most likely first."""
CATEGORIES = ("category", "l2-category", "split")


def is_vlmevalkit(record: Record) -> bool:
    return "prediction" in record and "doc_id" not in record


def vlmevalkit_predictions(path: Path, records: Sequence[Record], *, metric: str | None) -> Predictions:
    """Return the rows of a file of predictions, or of the file that an evaluation made from it.

    Rows without an answer, and those whose request failed, are left out.
    """
    for name in ("answer", "prediction"):
        if not any(name in record for record in records):
            raise UserError(
                f"{path}: no column {name!r} (found: {', '.join(records[0])}); is it a file of predictions?"
            )
    names = [name for name in METRICS if any(name in record for record in records)]
    found, notes = find_metric(records, path=path, wanted=metric, names=names, sole=False)
    rows, skipped = good_rows(_vlmevalkit_rows(path, records, metric=found))
    return Predictions(path=path, harness="VLMEvalKit", metric=found, rows=rows, skipped=skipped, notes=tuple(notes))


def _vlmevalkit_rows(
    path: Path, records: Sequence[Record], *, metric: str | None
) -> Iterator[tuple[int, PredictedRow | str]]:
    for place, record in enumerate(records):
        location = f"{path} row {place + 1}"
        label, prediction = shown(record.get("answer")).strip(), shown(record.get("prediction"))
        if not label:
            yield place, f"{location}: the answer is empty, so there is nothing to compare with"
        elif prediction.startswith(FAILED_REQUEST):
            yield place, f"{location}: the prediction is VLMEvalKit's note of a failed request; predict the row again"
        else:
            yield place, PredictedRow(
                key=shown(record.get("index")) or str(place),
                location=location,
                question=shown(record.get("question")),
                label=label,
                responses=(prediction,),
                theirs=None if metric is None else verdict(record, metric),
                datasource=next((text for name in CATEGORIES if (text := shown(record.get(name)))), path.stem),
                options={letter: text for letter in LETTERS if (text := shown(record.get(letter)))},
                images=_vlmevalkit_images(record),
            )


def _vlmevalkit_images(record: Record) -> tuple[str, ...]:
    image = record.get("image")
    return (image,) if isinstance(image, str) and image else ()


SAMPLES_SUFFIX = ".jsonl"


def read_predictions(path: Path, *, metric: str | None = None, max_rows: int | None = None) -> Predictions:
    """Return the contents of a file of VLMEvalKit or lmms-eval."""
    records = list(itertools.islice(_records(path), max_rows))
    if all(map(is_lmms_eval, records)):
        found = lmms_eval_predictions(path, records, metric=metric)
    elif any(map(is_vlmevalkit, records)):
        found = vlmevalkit_predictions(path, records, metric=metric)
    else:
        raise UserError(
            f"{path} holds no predictions: VLMEvalKit's have a column prediction, lmms-eval's a doc_id and "
            f"filtered_resps (found: {', '.join(records[0]) or 'nothing'}); with lmms-eval, add --log_samples"
        )
    if not found.rows:
        raise UserError(
            f"{path}: none of its {len(found.skipped)} rows can be judged; the first: {found.skipped[0].reason}"
        )
    return found


def _records(path: Path) -> list[Record]:
    if path.suffix in TABLE_SUFFIXES:
        return read_table(path)
    if path.suffix != SAMPLES_SUFFIX:
        raise UserError(
            f"{path}: unknown kind of file; known kinds are {', '.join((*TABLE_SUFFIXES, SAMPLES_SUFFIX))}"
        )
    if not path.is_file():
        raise UserError(f"no file {path}; check the path")
    records = []
    for line in read_json_lines(path):
        if line.record is None:
            raise UserError(f"{line.place}: the line is incomplete; write the file again")
        records.append(line.record)
    if not records:
        raise UserError(f"{path} holds no rows; check the path")
    return records
