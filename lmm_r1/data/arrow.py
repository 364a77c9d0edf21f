"""Rows of Parquet and Arrow files and of saved datasets. Their images stay in a memory map until they are read."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.data.formats.row_format import RawRow, Unreadable
from lmm_r1.data.messages import StoredBytes
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

COPIES_FOLDER = "lmm_r1_rows"
"""Below the cache folder of `datasets`."""
BATCH_ROWS = 256
FEWEST_BYTES = 1024
"""Shorter values are kept as bytes, because a reference would take as much memory."""
HELD_BYTES = 64 * 2**20
"""A file that decodes to more is copied to an uncompressed file, which is mapped."""
MOST_GROWTH = 1000
"""How many times its size a file may have when it is decoded, beyond `FREE_GROWTH_BYTES`; texts shrink to a tenth."""
FREE_GROWTH_BYTES = 2**30
_FILE_MAGIC = b"ARROW1"


def parquet_records(file: Path) -> Iterator[list[RawRow]]:
    """Yield the rows of a Parquet file in batches.

    Raises:
        UserError: it is not a Parquet file, decodes to far more than its size, or needs a copy that cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        # Read page by page: by default pyarrow reads ahead all column chunks, possibly gigabytes.
        with pyarrow.parquet.ParquetFile(file, buffer_size=2**18, pre_buffer=False) as table:
            batches = table.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
            yield from batch_records(_kept(batches, schema=table.schema_arrow, file=file), name=str(file))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file ({error})") from error


def arrow_records(file: Path) -> Iterator[list[RawRow]]:
    """Yield the rows of an Arrow file, in the file or the stream format, in batches; raises as `parquet_records` does."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as source:
            mapped = source.read_buffer()
            schema, batches = _opened(source)
            first = next(batches, None)
            if first is None:
                return
            data = [buffer for column in first.columns for buffer in column.buffers() if buffer]
            is_mapped = all(mapped.address <= one.address <= mapped.address + mapped.size for one in data)
            if is_mapped:
                yield from batch_records(_limited(chain([first], batches), file=file), name=str(file))
                return
        # Not through the map: all pages that are read through it would stay in memory.
        with pyarrow.OSFile(str(file)) as source:
            schema, batches = _opened(source)
            yield from batch_records(_kept(batches, schema=schema, file=file), name=str(file))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{file}: not a readable Arrow file ({error})") from error


def _opened(source: Any) -> tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    import pyarrow

    source.seek(0)
    magic = source.read(len(_FILE_MAGIC))
    source.seek(0)
    if magic != _FILE_MAGIC:
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema, iter(stream)
    file = pyarrow.ipc.open_file(source)
    return file.schema, (file.get_batch(number) for number in range(file.num_record_batches))


def _kept(
    batches: Iterable[pyarrow.RecordBatch], *, schema: pyarrow.Schema, file: Path
) -> Iterator[pyarrow.RecordBatch]:
    """Yield batches of which any number may be kept: with many images, those of a mapped copy.

    Raises:
        UserError: the copy cannot be written.
    """
    import pyarrow

    batches = _limited(batches, file=file)
    if not any(_holds_binary(field.type) for field in schema):
        yield from batches
        return
    held: list[pyarrow.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size > HELD_BYTES:
            break
    else:
        yield from held
        return
    with pyarrow.memory_map(str(_copy(chain(held, batches), schema=schema, file=file))) as source:
        yield from pyarrow.ipc.open_stream(source)


def _copy(batches: Iterable[pyarrow.RecordBatch], *, schema: pyarrow.Schema, file: Path) -> Path:
    """Return an uncompressed copy of a file's batches, written unless it is there.

    Copies of earlier versions of the file are deleted; processes that have mapped one keep it.
    """
    import datasets
    import pyarrow

    found = file.stat()
    parts = (os.path.realpath(file), f"{found.st_size} {found.st_mtime_ns}")
    digests = [hashlib.sha256(part.encode(errors="surrogateescape")).hexdigest()[:16] for part in parts]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / COPIES_FOLDER
    copy = folder / f"{'-'.join(digests)}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with copy.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if copy.exists():
                return copy
            logger.warning("%s: copied once to %s, because single images cannot be read from it", file, copy)
            # Only the process that holds the lock writes this file, so leftovers of a killed process are overwritten.
            partial = copy.with_suffix(".partial")
            try:
                with pyarrow.OSFile(str(partial), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                for earlier in folder.glob(f"{digests[0]}-*.arrow"):
                    earlier.unlink(missing_ok=True)
                partial.rename(copy)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno is None:
            # Not an error of the system: the batches cannot be decoded.
            raise
        raise UserError(
            f"{file}: its images are read from an uncompressed copy, which cannot be written to {folder} "
            f"({error}); free space there, or set the environment variable HF_DATASETS_CACHE to another folder"
        ) from error
    return copy


def _limited(batches: Iterable[pyarrow.RecordBatch], *, file: Path) -> Iterator[pyarrow.RecordBatch]:
    """Yield slices of batches; raises UserError if they become too large for their file, before they fill the memory."""
    size = file.stat().st_size
    left = max(FREE_GROWTH_BYTES, MOST_GROWTH * size)
    for batch in batches:
        left -= sum(map(_decoded_bytes, batch.columns))
        if left < 0:
            raise UserError(
                f"{file}: its rows take more than {MOST_GROWTH:,} times the {size:,} bytes of the file, as in a "
                "file that was made to fill the memory; write it again without repeated rows"
            )
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _decoded_bytes(array: pyarrow.Array) -> int:
    """Return the bytes of an array whose values are all written out."""
    import pyarrow.compute

    if not pyarrow.types.is_dictionary(array.type) or pyarrow.types.is_nested(array.type.value_type):
        return array.nbytes
    try:
        lengths = pyarrow.compute.binary_length(array.dictionary)
    except pyarrow.ArrowNotImplementedError:
        return array.nbytes
    return pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0


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
        columns = [_values(column, numbers, name=name) for column in batch.columns]
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
    if types.is_dictionary(kind):
        pairs = zip(array.indices.to_pylist(), rows, strict=True)
        return [
            None if at is None else _values(array.dictionary.slice(at, 1), [row], name=name)[0] for at, row in pairs
        ]
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
