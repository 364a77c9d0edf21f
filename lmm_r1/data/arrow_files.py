"""Rows of Arrow files that are mapped into memory; images stay in the file, and what is compressed is copied once."""

from __future__ import annotations

import bisect
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.data.arrow_values import column_values, holds_binary, to_records
from lmm_r1.data.stored_bytes import FEWEST_BYTES, FilePlace, FileState, StoredBytes
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

BATCH_ROWS = 256
COPIES_FOLDER = "lmm_r1_rows"
"""Below the cache folder of `datasets`: uncompressed copies of row files."""
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
            mapped = MappedFiles(name=name)
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


def arrow_copy(batches: Iterable[pyarrow.RecordBatch], *, schema: pyarrow.Schema, source: FileState) -> Path:
    """Return an uncompressed Arrow file of the batches; the processes of a machine, and later runs, share one.

    Raises:
        UserError: it cannot be written.
    """
    import datasets
    import filelock
    import pyarrow

    folder = Path(datasets.config.HF_DATASETS_CACHE) / COPIES_FOLDER
    told = f"{os.path.realpath(source.path)} {source.size} {source.mtime_ns}"
    copy = folder / f"{hashlib.sha256(told.encode()).hexdigest()[:24]}.arrow"
    # Only who has the lock writes it, so that what a killed process left is written over.
    partial = copy.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(copy.with_suffix(".lock")):
            if copy.exists():
                return copy
            logger.warning("%s: copied once to %s, as single images of it cannot be read", source.path, copy)
            try:
                with pyarrow.OSFile(str(partial), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                partial.rename(copy)
            finally:
                partial.unlink(missing_ok=True)
    # filelock raises NotImplementedError for file systems without locks.
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno is None:
            # Not the system's: Arrow cannot read the batches.
            raise
        raise UserError(
            f"{source.path}: its images are read from an uncompressed copy, which cannot be written to {folder} "
            f"({error}); make room there, or name another folder in the environment variable HF_DATASETS_CACHE"
        ) from error
    return copy


class MappedFiles:
    """The files that are mapped into this process's memory now; of systems that do not tell, none."""

    def __init__(self, *, name: str) -> None:
        """Take note of them.

        Args:
            name: what the user calls the rows, for messages.
        """
        self.name = name
        self._regions = sorted(_regions())
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


def _regions() -> Iterator[tuple[int, int, int, str]]:
    """Start, end, offset in the file, and path of each mapped file; see proc_pid_maps(5)."""
    for line in _MAPS.read_text(errors="surrogateescape").splitlines() if _MAPS.exists() else ():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and not fields[5].endswith(" (deleted)"):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            yield start, end, int(fields[2], 16), fields[5]
