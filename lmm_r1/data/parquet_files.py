"""Rows of Parquet files. Images stay in the file; needing one decodes all images of its row group."""

from __future__ import annotations

import bisect
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.data.arrow import BATCH_ROWS, STEP, arrow_copy, arrow_records, column_values, limited, to_records
from lmm_r1.data.formats.row_format import RawRow
from lmm_r1.data.messages import FEWEST_BYTES, FileState, StoredBytes
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

# Reading one image of a row group takes about 1 ms per 2 MiB on one core; files with larger groups are copied.
_LARGEST_GROUP = 8 * 2**20
# Per process, of which a rank may have many (data workers); rows that are read in order need no more.
_CACHE_BYTES = 64 * 2**20
_READ_BYTES = 2**18


def parquet_records(file: Path) -> Iterator[list[RawRow]]:
    """Yield the rows of a Parquet file in batches.

    Raises:
        UserError: it is not a Parquet file, or it has large row groups and their copy cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        state = FileState.of(str(file))
        with _opened(str(file)) as table:
            if max(_group_bytes(table), default=0) <= _LARGEST_GROUP:
                yield from _records(table, state)
                return
            batches = table.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
            copy = arrow_copy(limited(batches, source=state), schema=table.schema_arrow, source=state)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file ({error})") from error
    yield from arrow_records(copy, name=str(file))


def _opened(path: str, *, metadata: pyarrow.parquet.FileMetaData | None = None) -> pyarrow.parquet.ParquetFile:
    """Open a file to read it page by page: by default pyarrow reads ahead all column chunks, possibly gigabytes."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, metadata=metadata, buffer_size=_READ_BYTES, pre_buffer=False)


def _group_bytes(table: pyarrow.parquet.ParquetFile) -> Iterator[int]:
    columns = [
        number
        for number, column in enumerate(table.schema)
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type == "NONE"
    ]
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        yield sum(group.column(column).total_uncompressed_size for column in columns)


def _records(table: pyarrow.parquet.ParquetFile, state: FileState) -> Iterator[list[RawRow]]:
    row, leaves = 1, _GroupLeaves(state, 0)

    def batches() -> Iterator[pyarrow.RecordBatch]:
        nonlocal leaves
        for group in range(table.num_row_groups):
            leaves = _GroupLeaves(state, group)
            yield from table.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], use_threads=False)

    for batch in limited(batches(), source=state):
        yield to_records(batch, leaves.values, first_row=row)
        row += batch.num_rows


class _GroupLeaves:
    """Numbers the binary values of a row group, column by column, while they are read in order."""

    def __init__(self, state: FileState, group: int) -> None:
        self.state = state
        self.group = group
        self._places: dict[str, _GroupPlace] = {}
        self._counts: dict[str, int] = defaultdict(int)

    def values(self, array: pyarrow.Array, rows: Sequence[int], path: str) -> list[Any]:
        """Return the values of a binary array; long ones are returned as their place."""
        import pyarrow.compute

        first = self._counts[path]
        self._counts[path] += len(array)
        place = self._places.setdefault(path, _GroupPlace(self.state, self.group, path))
        lengths = pyarrow.compute.binary_length(array).to_pylist()
        return [
            (
                array[index].as_py()
                if length is None or length < FEWEST_BYTES
                else StoredBytes(place, first + index, length, row)
            )
            for index, (length, row) in enumerate(zip(lengths, rows, strict=True))
        ]


@dataclass(frozen=True)
class _GroupPlace:
    """A binary column of a row group; a position is the index of a value in it."""

    state: FileState
    group: int
    path: str

    @property
    def name(self) -> str:
        return self.state.path

    def read(self, position: int, length: int) -> bytes:
        column = _DECODED.get(self)
        value = self._decode(position) if column is None else column.value(position)
        if value is None or len(value) != length:
            raise OSError(f"{self.state.path} was changed")
        return value

    def _decode(self, position: int) -> bytes | None:
        """Return a value, and cache the column unless it is far larger than the file states.

        A dictionary with few values that many rows share has this effect.
        """
        import pyarrow
        import pyarrow.parquet

        self.state.check(os.stat(self.state.path))
        value, count, whole = None, 0, _DecodedColumn()
        with _opened(self.state.path, metadata=_metadata(self.state)) as table:
            try:
                for part in _parts(table, self):
                    if count <= position < count + part.count:
                        value = part.value(position - count)
                    count += part.count
                    if whole.nbytes <= 2 * _LARGEST_GROUP:
                        whole.extend(part)
                    elif value is not None:
                        return value
            except pyarrow.ArrowInvalid as error:
                raise OSError(f"{self.state.path} cannot be decoded ({error})") from error
        if whole.nbytes <= 2 * _LARGEST_GROUP:
            _DECODED.put(self, whole)
        return value


@lru_cache(maxsize=64)
def _metadata(state: FileState) -> pyarrow.parquet.FileMetaData:
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(state.path)


def _parts(table: pyarrow.parquet.ParquetFile, place: _GroupPlace) -> Iterator[_DecodedColumn]:
    """Yield a row group's column in batches, traversed in the same order as when its values were numbered."""
    name = place.path.partition(STEP)[0]
    for batch in table.iter_batches(
        batch_size=BATCH_ROWS, row_groups=[place.group], columns=[name], use_threads=False
    ):
        part = _DecodedColumn()

        def collect(array: pyarrow.Array, rows: Sequence[int], path: str, part: _DecodedColumn = part) -> list[None]:
            if path == place.path:
                part.add(array)
            return [None] * len(array)

        list(column_values(batch.column(name), collect, path=name, first_row=1))
        yield part


@dataclass
class _DecodedColumn:
    """The values of a binary column as Arrow arrays."""

    arrays: list[pyarrow.Array] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """The index of each array's first value."""
    count: int = 0
    nbytes: int = 0

    def add(self, array: pyarrow.Array) -> None:
        self.arrays.append(array)
        self.starts.append(self.count)
        self.count += len(array)
        self.nbytes += array.nbytes

    def extend(self, other: _DecodedColumn) -> None:
        for array in other.arrays:
            self.add(array)

    def value(self, position: int) -> bytes | None:
        if position >= self.count:
            return None
        place = bisect.bisect_right(self.starts, position) - 1
        return self.arrays[place][position - self.starts[place]].as_py()


class _DecodedColumns:
    """The most recently used columns of row groups, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._columns: OrderedDict[_GroupPlace, _DecodedColumn] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, place: _GroupPlace) -> _DecodedColumn | None:
        with self._lock:
            if place in self._columns:
                self._columns.move_to_end(place)
            return self._columns.get(place)

    def put(self, place: _GroupPlace, column: _DecodedColumn) -> None:
        """Cache a column, and drop the least recently used ones."""
        with self._lock:
            if place in self._columns:
                return
            self._columns[place] = column
            self.nbytes += column.nbytes
            while self.nbytes > self.most_bytes:
                _, dropped = self._columns.popitem(last=False)
                self.nbytes -= dropped.nbytes

    def after_fork(self) -> None:
        """Replace the lock: a thread that the child does not have may have held it."""
        self._lock = threading.Lock()


_DECODED = _DecodedColumns(_CACHE_BYTES)
os.register_at_fork(after_in_child=lambda: _DECODED.after_fork())
