"""Uncompressed copies of row files: the processes of a machine, and later runs, share one; those that nobody uses go."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from lmm_r1.data.stored_bytes import FileState
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

COPIES_FOLDER = "lmm_r1_rows"
"""Below the cache folder of `datasets`."""
_KEPT_SECONDS = 30 * 24 * 3600
# By folder: the names of the copies that this process uses, in a file that is locked for as long as it lives. One for
# all of them, so that thousands of copies take no descriptors; forks have it in common.
_USERS: dict[Path, IO[str]] = {}


def arrow_copy(batches: Iterable[pyarrow.RecordBatch], *, schema: pyarrow.Schema, source: FileState) -> Path:
    """Return an uncompressed Arrow file of the batches, which stays until this process ends.

    Copies that no process uses are deleted: those of the same file as it was before, and any after 30 days.

    Raises:
        UserError: it cannot be written.
    """
    import datasets
    import filelock

    folder = Path(datasets.config.HF_DATASETS_CACHE) / COPIES_FOLDER
    copy = folder / f"{_of_file(source)}-{_digest(f'{source.size} {source.mtime_ns}')}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(copy.with_suffix(".lock")):
            if not _used(copy):
                logger.warning("%s: copied once to %s, as single images of it cannot be read", source.path, copy)
                _write(batches, schema=schema, copy=copy)
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


def _of_file(source: FileState) -> str:
    """What the names of all copies of a file begin with."""
    return _digest(os.path.realpath(source.path))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _used(copy: Path) -> bool:
    """Say whether the copy is there; it stays then."""
    with _alone(copy.parent):
        if not copy.exists():
            return False
        # Not the copy's own time, by which its readers tell that nobody has written to it.
        os.utime(copy.with_suffix(".lock"))
        _use(copy)
        return True


def _write(batches: Iterable[pyarrow.RecordBatch], *, schema: pyarrow.Schema, copy: Path) -> None:
    """Write the copy, under its lock."""
    import pyarrow

    with _alone(copy.parent):
        # Before there is one more of them.
        _clean(copy)
    # Only who has the copy's lock writes it, so that what a killed process left is written over.
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
    """Keep other processes from saying what they use, and from deleting; for moments only."""
    import filelock

    with filelock.FileLock(folder / "users.lock"):
        yield


def _use(copy: Path) -> None:
    """Say that this process uses a copy."""
    folder = copy.parent
    if folder not in _USERS:
        descriptor, _ = tempfile.mkstemp(dir=folder, suffix=".user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _USERS[folder] = open(descriptor, "a", encoding="utf-8")
    _USERS[folder].write(f"{copy.name}\n")
    _USERS[folder].flush()


def _clean(new: Path) -> None:
    """Delete the copies that no process uses and the new one replaces, or that are old; and what killed processes left."""
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
        # Another user's, in a cache that several have: no reason to end a run.
        logger.warning("%s: old copies of row files stay there (%s)", new.parent, error)


def _last_use(copy: Path) -> float:
    """When it was made, or used again."""
    lock = copy.with_suffix(".lock")
    return max(file.stat().st_mtime for file in (copy, lock) if file.exists())


def _names(user: Path) -> list[str]:
    """The copies that a process uses; none of one that has ended, whose file is deleted."""
    with user.open("r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().split("\n")
    user.unlink()
    return []
