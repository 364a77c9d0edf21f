"""Files and folders that are either complete or do not exist."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lmm_r1.errors import UserError
from lmm_r1.files.full_disk import unwritable, writing


def check_creatable(path: Path, *, flag: str) -> None:
    """Raise UserError if `path` could not be created: below a file, or in a folder without write permission."""
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise UserError(f"{flag} {path}: cannot be written, because {nearest} is a file; choose another place")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{flag} {path}: there is no permission to write to {nearest}; choose another place")


def check_new_folder(path: Path, *, flag: str) -> None:
    """Raise UserError unless `path` does not exist, or is an empty folder, in a writable place."""
    check_creatable(path, flag=flag)
    if path.is_file():
        raise UserError(f"{flag} {path} is a file; name a folder")
    if path.exists() and any(path.iterdir()):
        raise UserError(f"{flag} {path} exists and is not empty; choose another folder")


def write_atomically(path: Path, *, text: str) -> None:
    """Write a UTF-8 file under a temporary name next to it, and rename it; creates its folder.

    Raises UserError if nothing can be written.
    """
    # A model's text can contain a lone surrogate, which has no encoding.
    write_bytes_atomically(path, data=text.encode("utf-8", errors="replace"))


def write_bytes_atomically(path: Path, *, data: bytes) -> None:
    """Write a file of bytes as `write_atomically` does."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the name of a file")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


@contextlib.contextmanager
def written_into(folder: Path, *, moves: bool = True) -> Iterator[Path]:
    """Yield a folder below `folder` to write into, whose files are moved to their places unless the block raises.

    Raises UserError if the disk is full.

    Args:
        moves: whether this process moves the files, if several processes enter the same folder.
    """
    partial = folder / ".partial"
    try:
        with writing(folder):
            yield partial
            if moves:
                for file in [path for path in partial.rglob("*") if path.is_file()]:
                    target = folder / file.relative_to(partial)
                    target.parent.mkdir(exist_ok=True)
                    file.replace(target)
    finally:
        if moves:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path` to write into, which is renamed to `path` unless the block raises.

    Raises UserError if nothing can be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with writing(path):
            yield folder
        folder.chmod(0o755)
        if path.exists():
            path.rmdir()
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# The errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock_of(output: Path) -> Path:
    """Return the lock file of an output whose folder must not change before there is something to write."""
    name = hashlib.sha256(os.path.abspath(output).encode()).hexdigest()[:32]
    return Path(tempfile.gettempdir()) / f"lmm-r1-locks-{os.getuid()}" / name


@contextmanager
def locked(path: Path, *, output: str) -> Iterator[None]:
    """Keep other processes out of an output while the block runs; the lock ends with the process.

    Child processes do not hold it. On a file system without locks, the block runs without one.

    Args:
        path: the lock file, which names the process that holds the lock.
        output: the flag and its value, for messages.

    Raises:
        UserError: another process holds the lock, or the file cannot be written.
    """
    file = _held(path, output=output)
    with file:
        try:
            with writing(output):
                file.truncate(0)
                # Bypass Python's buffer, which would fail again on a full disk when the file is closed.
                os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield
        finally:
            path.unlink(missing_ok=True)


def _held(path: Path, *, output: str) -> IO[str]:
    """Return the lock file, open and locked."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise unwritable(output, error) from error
        try:
            # Unlike flock's, this lock belongs to the process; forks do not keep it after the process was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have deleted the file in the meantime.
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"{output}: {holder} is writing it; wait until it ends, or choose another place"
            ) from error
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return file
            file.close()
            raise
        file.close()
