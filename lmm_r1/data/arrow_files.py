"""Rows of Arrow files that are mapped into memory; images stay in the file, and what is compressed is copied once."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.data.arrow_values import column_values, holds_binary, to_records
from lmm_r1.data.row_copies import arrow_copy
from lmm_r1.data.stored_bytes import FEWEST_BYTES, FilePlace, FileState, StoredBytes
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 256
_FILE_MAGIC = b"ARROW1"
_MAPS = Path("/proc/self/maps")


def arrow_records(file: Path, *, name: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of an Arrow file, of the file or the stream format, some at a time.

    Raises:
        UserError: it is no such file, or it is compressed and its copy cannot be written.
    """
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as source:
            _, batches = _opened(source)
            first = next(batches, None)
            if first is None:
                return
            mapped = MappedFiles([str(file)], name=name)
            if mapped.holds(first):
                yield from mapped_records(_cut(chain([first], batches)), mapped=mapped)
                return
        # Not through the map, of which all would be resident.
        with pyarrow.OSFile(str(file)) as source:
            schema, batches = _opened(source)
            copy = arrow_copy(batches, schema=schema, source=FileState.of(str(file)))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{file}: not a readable Arrow file ({error})") from error
    yield from arrow_records(copy, name=name)


def mapped_records(
    tables: Iterable[pyarrow.Table | pyarrow.RecordBatch], *, mapped: MappedFiles
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of tables whose memory may be that of mapped files."""
    row = 1
    for table in tables:
        yield to_records(table, mapped.values, first_row=row)
        row += table.num_rows


class MappedFiles:
    """Where files are mapped into this process's memory; of systems that do not tell, nowhere."""

    def __init__(self, files: Iterable[str], *, name: str) -> None:
        """Take note of it.

        Args:
            files: they stay mapped for as long as values are asked for: other memory may come to lie where one has left.
            name: what the user calls the rows, for messages.
        """
        self.name = name
        found, wanted = list(_regions()), set(map(_identity, files))
        known = {path for path in {region[3] for region in found} if _identity(path) in wanted - {None}}
        self._regions = sorted(region for region in found if region[3] in known)
        self._places: dict[str, FilePlace] = {}

    def holds(self, batch: pyarrow.RecordBatch) -> bool:
        """Return whether the batch's binary values lie in mapped files; True where the system does not tell."""
        found: list[bool] = []

        def look(array: pyarrow.Array, rows: Sequence[int], path: str) -> list[None]:
            data = array.buffers()[2]
            found.append(data is None or data.size < FEWEST_BYTES or self._find(data) is not None)
            return [None] * len(array)

        for field in batch.schema:
            if holds_binary(field.type):
                list(column_values(batch.column(field.name), look, path=field.name, first_row=1))
        return all(found) or not self._regions

    def values(self, array: pyarrow.Array, rows: Sequence[int], path: str) -> list[Any]:
        """Return the values of a binary array, long ones by their place where that is in a mapped file."""
        data = array.buffers()[2]
        found = None if data is None else self._find(data)
        if found is None:
            return array.to_pylist()
        place, start = found
        ends = value_ends(array)
        values: list[Any] = []
        for index, (row, null) in enumerate(zip(rows, array.is_null().to_pylist(), strict=True)):
            length = ends[index + 1] - ends[index]
            if null or length < FEWEST_BYTES:
                values.append(array[index].as_py())
            else:
                values.append(StoredBytes(place, start + ends[index], length, row))
        return values

    def _find(self, data: pyarrow.Buffer) -> tuple[FilePlace, int] | None:
        """The file in which a buffer lies, and the buffer's offset there."""
        place = bisect.bisect_right(self._regions, data.address, key=lambda region: region[0]) - 1
        if place < 0:
            return None
        start, end, offset, path = self._regions[place]
        if data.address + data.size > end:
            return None
        if path not in self._places:
            self._places[path] = FilePlace(FileState.of(path), name=self.name)
        return self._places[path], data.address - start + offset


def value_ends(array: pyarrow.Array) -> list[int]:
    """Return where the values of a binary array begin in its data, and the end of the last one."""
    import numpy as np
    import pyarrow

    kind = np.int64 if pyarrow.types.is_large_binary(array.type) else np.int32
    if not len(array):
        return [0]
    return np.frombuffer(array.buffers()[1], dtype=kind)[array.offset : array.offset + len(array) + 1].tolist()


def _opened(source: Any) -> tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    import pyarrow

    magic = source.read(len(_FILE_MAGIC))
    source.seek(0)
    if magic != _FILE_MAGIC:
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema, iter(stream)
    file = pyarrow.ipc.open_file(source)
    return file.schema, (file.get_batch(number) for number in range(file.num_record_batches))


def _cut(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Parts of at most `BATCH_ROWS` rows."""
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _identity(path: str) -> tuple[int, int] | None:
    """What tells a file from others whatever its path is; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _regions() -> Iterator[tuple[int, int, int, str]]:
    """Start, end, offset in the file, and path of each mapped file; see proc_pid_maps(5)."""
    for line in _MAPS.read_text(errors="surrogateescape").splitlines() if _MAPS.exists() else ():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and not fields[5].endswith(" (deleted)"):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            yield start, end, int(fields[2], 16), fields[5]
