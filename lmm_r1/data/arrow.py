"""Rows of Parquet files and of datasets. Long binary values, such as images, stay in a memory map until they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.data.formats.row_format import RawRow, Unreadable
from lmm_r1.data.messages import StoredBytes
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow

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

    columns = [
        column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column for column in batch.columns
    ]
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
