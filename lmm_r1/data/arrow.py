"""Rows of Arrow files as Python objects, and uncompressed copies of row files on disk."""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from lmm_r1.data.formats.row_format import RawRow
from lmm_r1.data.messages import FEWEST_BYTES, FilePlace, FileState, StoredBytes
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import pyarrow


STEP = "\0"
"""Separates the names in a path; unlike a dot, it occurs in no column name."""
Leaf: TypeAlias = "Callable[[pyarrow.Array, Sequence[int], str], list[Any]]"
"""Returns the values of a binary array, given the array, the row of each value and the array's path in the table."""


def holds_binary(kind: pyarrow.DataType) -> bool:
    """Return whether `to_values` finds binary values in arrays of this type."""
    from pyarrow import types

    if types.is_dictionary(kind) or _is_list(kind):
        return holds_binary(kind.value_type)
    if types.is_struct(kind):
        return any(holds_binary(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def to_records(table: pyarrow.Table | pyarrow.RecordBatch, leaf: Leaf, *, first_row: int) -> list[RawRow]:
    """Return the rows as `to_pylist` does, except that `leaf` makes the binary values."""
    columns = [
        (
            list(column_values(column, leaf, path=name, first_row=first_row))
            if holds_binary(column.type)
            else column.to_pylist()
        )
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    return [dict(zip(table.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def column_values(
    column: pyarrow.ChunkedArray | pyarrow.Array, leaf: Leaf, *, path: str, first_row: int
) -> Iterator[Any]:
    """Yield the values of one column, chunk by chunk."""
    for chunk in getattr(column, "chunks", [column]):
        yield from to_values(chunk, leaf, rows=range(first_row, first_row + len(chunk)), path=path)
        first_row += len(chunk)


def to_values(array: pyarrow.Array, leaf: Leaf, *, rows: Sequence[int], path: str) -> list[Any]:
    """Return an array's values; the order in which `leaf` gets binary arrays does not depend on how rows are batched.

    Args:
        rows: the row of each value.
        path: the names from the column down to this array, joined by `STEP`.
    """
    from pyarrow import types

    kind = array.type
    if not holds_binary(kind):
        return array.to_pylist()
    if types.is_dictionary(kind):
        return _dictionary(array, leaf, rows=rows, path=path)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        fields = [
            to_values(array.field(place), leaf, rows=rows, path=f"{path}{STEP}{name}")
            for place, name in enumerate(names)
        ]
        return _where_valid(array, (dict(zip(names, values, strict=True)) for values in zip(*fields, strict=True)))
    if _is_list(kind):
        return _lists(array, leaf, rows=rows, path=path)
    return leaf(array, rows, path)


def _is_list(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _where_valid(array: pyarrow.Array, values: Iterable[Any]) -> list[Any]:
    if not array.null_count:
        return list(values)
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _lists(array: pyarrow.Array, leaf: Leaf, *, rows: Sequence[int], path: str) -> list[Any]:
    from pyarrow import types

    if types.is_fixed_size_list(array.type):
        size = array.type.list_size
        ends = list(range(array.offset * size, (array.offset + len(array)) * size + 1, size or 1))
    else:
        ends = array.offsets.to_pylist()
    spans = list(pairwise(ends))
    held = array.values.slice(ends[0], ends[-1] - ends[0])
    held_rows = list(
        chain.from_iterable(repeat(row, end - start) for row, (start, end) in zip(rows, spans, strict=True))
    )
    values = to_values(held, leaf, rows=held_rows, path=f"{path}{STEP}list")
    return _where_valid(array, (values[start - ends[0] : end - ends[0]] for start, end in spans))


def _dictionary(array: pyarrow.Array, leaf: Leaf, *, rows: Sequence[int], path: str) -> list[Any]:
    values: list[Any] = []
    for index, row in zip(array.indices.to_pylist(), rows, strict=True):
        if index is None:
            values.append(None)
        else:
            values += to_values(array.dictionary.slice(index, 1), leaf, rows=[row], path=path)
    return values


logger = logging.getLogger(__name__)

COPIES_FOLDER = "lmm_r1_rows"
"""Below the cache folder of `datasets`."""
_KEPT_SECONDS = 30 * 24 * 3600
# By folder: a file with the names of the copies that this process uses, locked for the life of the process. One file
# lists all copies, so that thousands of them need no descriptors; forked processes share it.
_USERS: dict[Path, IO[str]] = {}


def arrow_copy(batches: Iterable[pyarrow.RecordBatch], *, schema: pyarrow.Schema, source: FileState) -> Path:
    """Return an uncompressed Arrow file of the batches, which is kept until this process ends.

    Unused copies are deleted: those of an earlier version of the same file, and any after 30 days.

    Raises:
        UserError: the copy cannot be written.
    """
    import datasets
    import filelock

    folder = Path(datasets.config.HF_DATASETS_CACHE) / COPIES_FOLDER
    copy = folder / f"{_of_file(source)}-{_digest(f'{source.size} {source.mtime_ns}')}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(copy.with_suffix(".lock")):
            if not _used(copy):
                logger.warning(
                    "%s: copied once to %s, because single images cannot be read from it", source.path, copy
                )
                _write(batches, schema=schema, copy=copy)
    # filelock raises NotImplementedError for file systems without locks.
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno is None:
            # Not an error of the system: Arrow cannot read the batches.
            raise
        raise UserError(
            f"{source.path}: its images are read from an uncompressed copy, which cannot be written to {folder} "
            f"({error}); free space there, or set the environment variable HF_DATASETS_CACHE to another folder"
        ) from error
    return copy


def _of_file(source: FileState) -> str:
    return _digest(os.path.realpath(source.path))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _used(copy: Path) -> bool:
    with _alone(copy.parent):
        if not copy.exists():
            return False
        # Readers use the copy's own time to check that nobody has written to it, so leave it unchanged.
        os.utime(copy.with_suffix(".lock"))
        _use(copy)
        return True


def _write(batches: Iterable[pyarrow.RecordBatch], *, schema: pyarrow.Schema, copy: Path) -> None:
    import pyarrow

    with _alone(copy.parent):
        _clean(copy)
    # Only the process that holds the copy's lock writes this file, so leftovers of a killed process are overwritten.
    partial = copy.with_suffix(".partial")
    try:
        with pyarrow.OSFile(str(partial), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        with _alone(copy.parent):
            partial.rename(copy)
            _use(copy)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from registering or deleting copies; hold it only briefly."""
    import filelock

    with filelock.FileLock(folder / "users.lock"):
        yield


def _use(copy: Path) -> None:
    folder = copy.parent
    if folder not in _USERS:
        descriptor, _ = tempfile.mkstemp(dir=folder, suffix=".user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _USERS[folder] = open(descriptor, "a", encoding="utf-8")
    _USERS[folder].write(f"{copy.name}\n")
    _USERS[folder].flush()


def _clean(new: Path) -> None:
    """Delete unused copies that the new one replaces or that are old, and the leftovers of killed processes."""
    import filelock

    try:
        used = {name for user in new.parent.glob("*.user") for name in _names(user)}
        oldest = time.time() - _KEPT_SECONDS
        for file in new.parent.glob("*.arrow"):
            replaced = file.name.partition("-")[0] == new.name.partition("-")[0]
            if file.name not in used and (replaced or _last_use(file) < oldest):
                file.unlink()
        for file in new.parent.glob("*.partial"):
            with contextlib.suppress(filelock.Timeout), filelock.FileLock(file.with_suffix(".lock"), timeout=0):
                file.unlink()
    except OSError as error:
        # In a shared cache the files may belong to another user, which is no reason to end a run.
        logger.warning("%s: old copies of row files cannot be deleted (%s)", new.parent, error)


def _last_use(copy: Path) -> float:
    lock = copy.with_suffix(".lock")
    return max(file.stat().st_mtime for file in (copy, lock) if file.exists())


def _names(user: Path) -> list[str]:
    """Return the copies that a process uses; if the process has ended, delete its file and return none."""
    with user.open("r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().split("\n")
    user.unlink()
    return []


BATCH_ROWS = 256
MOST_GROWTH = 1000
"""How many times its size a file may have when it is decoded, beyond `FREE_GROWTH_BYTES`; texts shrink to a tenth."""
FREE_GROWTH_BYTES = 2**30
_FILE_MAGIC = b"ARROW1"
_MAPS = Path("/proc/self/maps")


def arrow_records(file: Path, *, name: str) -> Iterator[list[RawRow]]:
    """Yield the rows of an Arrow file, in the file or the stream format, in batches.

    Raises:
        UserError: it is not an Arrow file, or it is compressed and its copy cannot be written.
    """
    import pyarrow

    try:
        state = FileState.of(str(file))
        with pyarrow.memory_map(str(file)) as source:
            _, batches = _opened(source)
            first = next(batches, None)
            if first is None:
                return
            mapped = MappedFiles([str(file)], name=name)
            if mapped.holds(first):
                yield from mapped_records(_cut(limited(chain([first], batches), source=state)), mapped=mapped)
                return
        # Not through the map: all pages that are read through it would stay in memory.
        with pyarrow.OSFile(str(file)) as source:
            schema, batches = _opened(source)
            copy = arrow_copy(limited(batches, source=state), schema=schema, source=state)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{file}: not a readable Arrow file ({error})") from error
    yield from arrow_records(copy, name=name)


def mapped_records(
    tables: Iterable[pyarrow.Table | pyarrow.RecordBatch], *, mapped: MappedFiles
) -> Iterator[list[RawRow]]:
    """Yield the rows of tables whose memory may belong to mapped files."""
    row = 1
    for table in tables:
        yield to_records(table, mapped.values, first_row=row)
        row += table.num_rows


class MappedFiles:
    """Where files are mapped into this process's memory; finds nothing on systems that do not report it."""

    def __init__(self, files: Iterable[str], *, name: str) -> None:
        """Read the current mappings.

        Args:
            files: they must stay mapped while values are read, because other memory may take a freed address.
            name: the user's name for the rows, for messages.
        """
        self.name = name
        found, wanted = list(_regions()), set(map(_identity, files))
        known = {path for path in {region[3] for region in found} if _identity(path) in wanted - {None}}
        self._regions = sorted(region for region in found if region[3] in known)
        self._places: dict[str, FilePlace] = {}

    def holds(self, batch: pyarrow.RecordBatch) -> bool:
        """Return whether the batch's binary values lie in mapped files; True if the system does not report it."""
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
        """Return the values of a binary array; long values in a mapped file are returned as their place."""
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
        """Return the file in which a buffer lies, and the buffer's offset in it."""
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
    """Return the offsets at which the values of a binary array begin, followed by the end of the last one."""
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
    """Yield slices of at most `BATCH_ROWS` rows."""
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def limited(batches: Iterable[pyarrow.RecordBatch], *, source: FileState) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of a file; raises UserError when they become too large for it, before they fill the memory."""
    left = max(FREE_GROWTH_BYTES, MOST_GROWTH * source.size)
    for batch in batches:
        left -= sum(map(_decoded_bytes, batch.columns))
        if left < 0:
            raise UserError(
                f"{source.path}: its rows take more than {MOST_GROWTH:,} times the {source.size:,} bytes of the file, as in a "
                "file that was made to fill the memory; write it again without repeated rows"
            )
        yield batch


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


def _identity(path: str) -> tuple[int, int] | None:
    """Return what identifies a file independent of its path; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _regions() -> Iterator[tuple[int, int, int, str]]:
    """Yield start, end, offset in the file, and path of each mapped file; see proc_pid_maps(5)."""
    for line in _MAPS.read_text(errors="surrogateescape").splitlines() if _MAPS.exists() else ():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and not fields[5].endswith(" (deleted)"):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            yield start, end, int(fields[2], 16), fields[5]
