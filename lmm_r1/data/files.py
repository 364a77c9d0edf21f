"""Row files, one record at a time: JSON lines, JSON, Parquet, CSV, TSV, saved datasets and Hugging Face names."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from PIL import Image

from lmm_r1 import hub
from lmm_r1.data.formats import PROMPT_ROWS, FormatSet
from lmm_r1.data.formats.row_format import Fields, RawRow, Record, RowFormat, Unreadable
from lmm_r1.data.media_access import hub_folder
from lmm_r1.data.messages import BadRows, PreferenceRow, Row, SkippedRow, StoredBytes, as_prompt
from lmm_r1.data.reading import AS_THEY_ARE, RowReading, good_rows
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable, lock_of, locked, writing

if TYPE_CHECKING:
    import datasets
    import pyarrow

ROWS_FILE = "rows.jsonl"
"""The name of the row file in a folder written by `make_task` or `prepare_data`."""
IMAGES_FOLDER = "images"
# The largest limit that the csv module accepts on every system: an image of 1.5 GiB as base64.
_LONGEST_FIELD = 2**31 - 1
# How names begin that no dataset on the hub has.
_LOCAL = ("/", ".", "~")
_SEPARATED = {"excel": "comma-separated", "excel-tab": "tab-separated"}


def read_records(path: str, *, split: str = "train") -> Iterator[Record]:
    """Yield (record, location such as `rows.jsonl line 7`, folder that relative image paths start from).

    Raises UserError if the file is missing or a line cannot be read.

    Args:
        path: a .jsonl, .json, .parquet, .csv or .tsv file; a folder with rows.jsonl, from `save_to_disk`, or of data
            files; or a name on the Hugging Face hub. `NAME@SUBFOLDER` reads one subfolder of a folder or a hub dataset.
        split: the split of a dataset that has several; single files have none.
    """
    for record in all_records(path, split=split):
        if isinstance(record[0], Unreadable):
            raise record[0].error
        yield record


def all_records(path: str, *, split: str) -> Iterator[Record]:
    """Yield what `read_records` does, but an `Unreadable` for each line that cannot be read."""
    file = _row_file(path)
    if file is None:
        yield from _read_dataset(path, split=split)
        return
    if not file.is_file():
        raise UserError(f"no row file {path}; check the path")
    yield from _READERS[file.suffix.lower()](file)


def _row_file(path: str) -> Path | None:
    file = Path(path)
    if file.is_dir() and (file / ROWS_FILE).is_file():
        file = file / ROWS_FILE
    return file if file.suffix.lower() in _READERS else None


def is_read_directly(path: str) -> bool:
    """Return whether rows are a local file, there or not; others may be on the hub, or are a folder for `datasets`."""
    return _row_file(path) is not None or (path.startswith(_LOCAL) and not Path(path).exists())


RowT = TypeVar("RowT", bound=Row | PreferenceRow)


@dataclass(frozen=True, kw_only=True)
class RowFile(Generic[RowT]):
    """The rows of one file, and the format that was detected."""

    path: str
    row_format: RowFormat[Any]
    rows: dict[int, RowT]
    """By their index in the file."""
    skipped: list[SkippedRow]
    """The invalid records, if these are left out."""
    kind: str = ""
    """Of other rows than prompts: ` of the kind preference`."""

    @property
    def summary(self) -> str:
        """One line for the user: `rows.jsonl: 6 rows in the format easyr1 (EasyR1)`."""
        named = f"{self.row_format.name} ({self.row_format.source})"
        prefilled = sum(isinstance(row, Row) and bool(row.prefill) for row in self.rows.values())
        begun = f"; {prefilled} of them begin the response (prefill)" if prefilled else ""
        return f"{self.path}: {len(self.rows)} rows{self.kind} in the format {named}{begun}"

    @property
    def summary_as_prompts(self) -> str:
        """The summary for a command that samples responses; says which worked answers the model does not see."""
        rows = (row for row in self.rows.values() if isinstance(row, Row))
        worked = sum(row.response is not None and not row.prefill for row in rows)
        if not worked:
            return self.summary
        return f"{self.summary}; the worked answers of {worked} are not part of the prompts"


def read_row_file(
    path: str,
    *,
    split: str = "train",
    max_rows: int | None = None,
    reading: RowReading = AS_THEY_ARE,
    answer_required: bool = True,
    check: Callable[[Row], Row | None] | None = None,
    bad_rows: BadRows = "stop",
    skip_by: str | None = None,
) -> RowFile[Row]:
    """Return the first `max_rows` rows, validated, with local images and videos that exist.

    Args:
        check: raises UserError for a row that the command cannot use; may return a row in its place.
        bad_rows: whether invalid records are an error, or are returned as `skipped`.
        skip_by: the flag that leaves out bad rows, for messages; None if the command has none.

    Raises:
        UserError: the file is missing or empty, several formats fit its columns, none of its rows is valid, or records
            are invalid (lists all of them with file and line).
    """
    row_format, records = found_records(path, PROMPT_ROWS, split=split, max_rows=max_rows, reading=reading)

    def make(record: Record) -> Row:
        fields, location, base_dir = record
        row = as_prompt(
            reading.row(
                fields,
                row_format=row_format,
                location=location,
                base_dir=base_dir,
                answer_required=answer_required,
                media_required=True,
            )
        )
        return row if check is None else check(row) or row

    rows, skipped = good_rows(path, records, make, bad_rows=bad_rows, skip_by=skip_by)
    return RowFile(path=path, row_format=row_format, rows=rows, skipped=skipped)


def found_records(
    path: str, formats: FormatSet[Fields], *, split: str, max_rows: int | None, reading: RowReading
) -> tuple[RowFormat[Fields], Iterator[Record]]:
    """Return the format of a file, detected from the columns of its first records, and its first `max_rows` records.

    Raises:
        UserError: the file is missing, several formats fit its columns, or the named format is for another kind of row.
            While the records are read: one cannot be read.
    """
    records = all_records(path, split=split)
    named = reading.names
    if reading.format is not None:
        row_format = formats.named(reading.format, file=path, names=named)
    elif named.prompt is not None or named.names_sides:
        row_format = formats.own
    else:
        first = list(itertools.islice(records, BATCH_ROWS if max_rows is None else min(max_rows, BATCH_ROWS)))
        found = {name for fields, _, _ in first for name in fields}
        # Unreadable lines are reported one by one later on.
        readable = not all(isinstance(fields, Unreadable) for fields, _, _ in first)
        row_format = formats.find(found, file=path, named=named) if readable else formats.own
        records = itertools.chain(first, records)
    if row_format.each is not None:
        records = map(row_format.each, records)
    return row_format, itertools.islice(records, max_rows)


def first_columns(path: str, *, split: str = "train") -> set[str]:
    """Return the columns of a file's first records, from which its format is detected."""
    return {name for fields, _, _ in itertools.islice(all_records(path, split=split), BATCH_ROWS) for name in fields}


def _checked(record: Any, *, location: str) -> RawRow:
    if not isinstance(record, dict):
        return Unreadable(UserError(f"{location}: must be a JSON object, not {type(record).__name__}"))
    return record


def _read_jsonl(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            location = f"{file} line {number}"
            try:
                record = _json_line(line, encoding="utf-8-sig" if number == 1 else "utf-8", location=location)
            except UserError as error:
                record = Unreadable(error)
            if record is not None:
                yield record, location, file.parent


def _json_line(line: bytes, *, encoding: str, location: str) -> RawRow | None:
    """Return the record in a line, None for a blank one; raises UserError if the line is not JSON."""
    try:
        text = line.decode(encoding)
        return _checked(json.loads(text.rstrip("\r\n")), location=location) if text.strip() else None
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: not UTF-8 text ({error})") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{location}: not valid JSON: {error.msg} at column {error.colno}; correct or remove the line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: cannot be read: {error}; correct or remove the line") from error


def _read_json(file: Path) -> Iterator[Record]:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error})") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines under the name .json, which `datasets` reads too
            yield from _read_jsonl(file)
            return
        raise UserError(f"{file} line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read: {error}; correct the file") from error
    if isinstance(content, dict) and content and all(isinstance(value, dict) for value in content.values()):
        content = list(content.values())  # an object with one row per name or number
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise UserError(f"{file}: must be a list of rows, or an object with exactly one list; found {len(lists)}")
        content = lists[0]
    if not isinstance(content, list):
        raise UserError(f"{file}: must be a list of rows, not {type(content).__name__}")
    for number, record in enumerate(content, start=1):
        location = f"{file} row {number}"
        yield _checked(record, location=location), location, file.parent


def _read_separated(file: Path, *, dialect: str) -> Iterator[Record]:
    """Yield the lines below a header line; all values are text (007 is not 7), and an empty one counts as missing."""
    csv.field_size_limit(_LONGEST_FIELD)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        lines = csv.reader(stream, dialect=dialect, strict=True)
        names: list[str] | None = None
        while True:
            location, wrong = f"{file} line {lines.line_num + 1}", None
            try:
                values = next(lines, None)
            except UnicodeDecodeError as error:
                raise UserError(f"{file}: not UTF-8 text ({error})") from error
            except csv.Error as error:
                values, wrong = (
                    [],
                    f"{location}: not {_SEPARATED[dialect]} values: {error}; correct or remove the line",
                )
                # A quote without its end has taken all following lines.
                if names is None or "end of data" in str(error):
                    raise UserError(wrong) from error
            if values is None:
                return
            if names is None:
                names = values
                if twice := [name for name, count in Counter(filter(None, names)).items() if count > 1]:
                    raise UserError(f"{location}: two columns have the name {twice[0]}; rename one of them")
                continue
            if values and len(values) != len(names):
                wrong = f"{location}: {len(values)} values under {len(names)} names; correct the line"
            if wrong is not None:
                yield Unreadable(UserError(wrong)), location, file.parent
            elif values:
                yield dict(zip(names, (value or None for value in values), strict=True)), location, file.parent


def _read_dataset(path: str, *, split: str) -> Iterator[Record]:
    import datasets

    name, _, subfolder = path.partition("@") if not Path(path).exists() else (path, "", "")
    folder = Path(name)
    if not folder.exists() and name.startswith(_LOCAL):
        raise UserError(f"no row file or folder {name}; check the path")
    if folder.is_file():
        raise UserError(f"{name}: unknown kind of row file; known kinds are {', '.join(_READERS)}")
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            dataset = datasets.load_from_disk(name)
        else:
            if not folder.exists():
                hub.is_reachable()
            dataset = datasets.load_dataset(name, data_dir=subfolder or None)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        if folder.exists():
            raise UserError(f"{path}: this folder cannot be loaded as a dataset ({error}); check the path") from error
        raise UserError(
            f"{path}: no such file or folder, and no dataset of this name can be loaded from the hub ({error}); "
            "check the path or the name"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise UserError(f"{path} has no split {split!r}; its splits are {', '.join(dataset)}: choose one of them")
        dataset = dataset[split]
    base_dir = folder if folder.is_dir() else hub_folder(name)
    yield from _numbered(dataset_records(dataset, name=path), name=path, base_dir=base_dir)


def _numbered(batches: Iterator[list[RawRow]], *, name: str, base_dir: Path) -> Iterator[Record]:
    for number, record in enumerate(itertools.chain.from_iterable(batches), start=1):
        yield record, f"{name} row {number}", base_dir


_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": lambda file: _numbered(parquet_records(file), name=str(file), base_dir=file.parent),
    ".csv": partial(_read_separated, dialect="excel"),
    ".tsv": partial(_read_separated, dialect="excel-tab"),
}


ROW_PARTS = (ROWS_FILE, IMAGES_FOLDER)


def check_writable(output: Path, *, overwrite: bool, parts: Collection[str] = ROW_PARTS) -> None:
    """Raise UserError unless `output` can be created, or is an empty folder or (with `overwrite`) one of `parts`."""
    check_creatable(output, flag="--output")
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder")
    names = {entry.name for entry in output.iterdir()}
    if names and not overwrite:
        raise UserError(f"--output {output} is not empty; name another folder or add --overwrite")
    if foreign := sorted(names.difference(parts)):
        raise UserError(
            f"--output {output} holds {foreign[0]}, which is not part of a row folder; name another folder"
        )


@contextmanager
def row_folder(output: Path, *, overwrite: bool, parts: Collection[str] = ROW_PARTS) -> Iterator[Path]:
    """Yield a folder to write into, which replaces `output` when it is complete; an error leaves nothing behind.

    Raises UserError if the disk is full, or another process writes the folder.
    """
    check_writable(output, overwrite=overwrite, parts=parts)
    output = Path(os.path.abspath(output))
    partial, replaced = (output.with_name(f".{output.name}.{state}") for state in ("partial", "replaced"))
    with locked(lock_of(output), output=f"--output {output}"), writing(output):
        # Leftovers of a killed process.
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            if output.exists():
                output.rename(replaced)
            partial.rename(output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)


def write_row_folder(records: Iterable[Mapping[str, Any]], *, output: Path, overwrite: bool = False) -> int:
    """Write the records and return their number; PIL images become PNG files that rows.jsonl names by relative path.

    Raises what `row_folder` does.
    """
    count = 0
    with (
        row_folder(output, overwrite=overwrite) as folder,
        (folder / ROWS_FILE).open("w", encoding="utf-8", newline="\n") as lines,
    ):
        for count, record in enumerate(records, start=1):
            stored = _with_image_files(record, folder=folder, row_number=count)
            lines.write(json.dumps(stored, ensure_ascii=False) + "\n")
    return count


def _with_image_files(record: Mapping[str, Any], *, folder: Path, row_number: int) -> RawRow:
    """Return a copy of `record` in which each PIL image is the relative path of a PNG file written under `folder`."""
    stored = {**record, "messages": copy.deepcopy(record["messages"])}
    listed = (message["content"] for message in stored["messages"] if not isinstance(message["content"], str))
    parts = [part for content in listed for part in content if isinstance(part.get("image"), Image.Image)]
    for number, part in enumerate(parts, start=1):
        name = f"{IMAGES_FOLDER}/{row_number:06d}_{number}.png"
        (folder / IMAGES_FOLDER).mkdir(exist_ok=True)
        part["image"].save(folder / name, format="PNG", optimize=True)
        part["image"] = name
    return stored


BATCH_ROWS = 256
FEWEST_BYTES = 1024
"""Shorter values are kept as bytes, because a reference would take as much memory."""
HELD_BYTES = 64 * 2**20
"""A file with more decoded bytes is copied to an uncompressed file by `datasets`, which maps it."""
MOST_GROWTH = 1000
"""How many times its size a file may have when it is decoded, beyond `FREE_GROWTH_BYTES`; texts shrink to a tenth."""
FREE_GROWTH_BYTES = 2**30


def parquet_records(file: Path) -> Iterator[list[RawRow]]:
    """Yield the rows of a Parquet file in batches.

    Raises:
        UserError: it is not a Parquet file, decodes to far more than its size, or needs a copy that cannot be written.
    """
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        # Read page by page: by default pyarrow reads ahead all column chunks, possibly gigabytes.
        with pyarrow.parquet.ParquetFile(file, buffer_size=2**18, pre_buffer=False) as table:
            batches = _limited(table.iter_batches(batch_size=BATCH_ROWS, use_threads=False), file=file)
            held, size = [], 0
            if any(_holds_binary(field.type) for field in table.schema_arrow):
                for batch in batches:
                    held.append(batch)
                    size += batch.nbytes
                    if size > HELD_BYTES:
                        break
            if size <= HELD_BYTES:
                yield from batch_records(chain(held, batches), name=str(file))
                return
            del held
        rows = datasets.load_dataset("parquet", data_files=str(file), split="train", batch_size=BATCH_ROWS)
    except (pyarrow.ArrowException, datasets.exceptions.DatasetsError, OSError, NotImplementedError) as error:
        cause = error.__cause__ or error
        raise UserError(
            f"{file}: not a readable Parquet file, or its copy cannot be written to {datasets.config.HF_DATASETS_CACHE} "
            f"({cause}); correct it, or set HF_DATASETS_CACHE to another folder"
        ) from error
    yield from dataset_records(rows, name=str(file))


def dataset_records(dataset: datasets.Dataset, *, name: str) -> Iterator[list[RawRow]]:
    """Yield the rows of a mapped dataset in batches; `name` is the user's name for it, for messages."""
    # The Arrow view leaves image features encoded ({"bytes": ..., "path": ...}) instead of decoding each image.
    tables = dataset.with_format("arrow").iter(batch_size=BATCH_ROWS)
    yield from batch_records((batch for table in tables for batch in table.to_batches()), name=name)


def _limited(batches: Iterable[pyarrow.RecordBatch], *, file: Path) -> Iterator[pyarrow.RecordBatch]:
    """Yield batches; raises UserError if they become too large for their file, before they fill the memory."""
    size = file.stat().st_size
    left = max(FREE_GROWTH_BYTES, MOST_GROWTH * size)
    for batch in batches:
        left -= _decoded(batch).nbytes
        if left < 0:
            raise UserError(
                f"{file}: its rows take more than {MOST_GROWTH:,} times the {size:,} bytes of the file, as in a "
                "file that was made to fill the memory; write it again without repeated rows"
            )
        yield batch


def _decoded(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return a batch with all values of its columns written out."""
    import pyarrow

    columns = [one.dictionary_decode() if pyarrow.types.is_dictionary(one.type) else one for one in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, batch.schema.names)


def batch_records(batches: Iterable[pyarrow.RecordBatch], *, name: str) -> Iterator[list[RawRow]]:
    """Yield the rows as `to_pylist` returns them, except that long binary values become `StoredBytes`.

    A row that cannot be read becomes an `Unreadable`, which names it.

    Args:
        name: the user's name for the rows, for messages.
    """
    first = 1
    for batch in batches:
        yield _rows(batch, first, name=name)
        first += batch.num_rows


def _rows(batch: pyarrow.RecordBatch, first: int, *, name: str) -> list[RawRow]:
    numbers = range(first, first + batch.num_rows)
    try:
        # Values of a damaged file may lie outside of it, and texts may not be UTF-8.
        batch.validate(full=True)
        columns = [_values(column, numbers, name=name) for column in _decoded(batch).columns]
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            return [row for at, number in enumerate(numbers) for row in _rows(batch.slice(at, 1), number, name=name)]
        return [Unreadable(UserError(f"{name} row {first}: cannot be read ({error}); correct or remove the row"))]
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _holds_binary(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind) or _is_list(kind):
        return _holds_binary(kind.value_type)
    if types.is_struct(kind):
        return any(_holds_binary(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_list(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _values(array: pyarrow.Array, rows: Sequence[int], *, name: str) -> list[Any]:
    """Return an array's values; `rows` are the row numbers of each."""
    import pyarrow.compute
    from pyarrow import types

    kind = array.type
    if not _holds_binary(kind):
        return array.to_pylist()
    if _is_list(kind):
        lengths = pyarrow.compute.list_value_length(array).to_pylist()
        inner = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length or 0)]
        held = iter(_values(array.flatten(), inner, name=name))
        return [None if length is None else list(islice(held, length)) for length in lengths]
    if types.is_struct(kind):
        fields = [_values(column, rows, name=name) for column in array.flatten()]
        names = [field.name for field in kind]
        values: list[Any] = [dict(zip(names, entry, strict=True)) for entry in zip(*fields, strict=True)]
    else:
        values = _bytes(array, rows, name=name)
    return [value if is_valid else None for value, is_valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _bytes(array: pyarrow.Array, rows: Sequence[int], *, name: str) -> list[Any]:
    import numpy as np
    import pyarrow

    _, ends, data = array.buffers()
    if not len(array) or data is None:
        return array.to_pylist()
    kind = np.int64 if pyarrow.types.is_large_binary(array.type) else np.int32
    places = np.frombuffer(ends, dtype=kind)[array.offset : array.offset + len(array) + 1].tolist()
    return [
        (
            data[start:end].to_pybytes()
            if end - start < FEWEST_BYTES
            else StoredBytes(data[start:end], file=name, row=row)
        )
        for row, (start, end) in zip(rows, pairwise(places), strict=True)
    ]
