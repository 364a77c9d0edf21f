"""Files and folders that are either complete or do not exist, and the errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

from lmm_r1.errors import UserError

_ANOTHER = "choose another place"
# The system's errors, and what to do about them.
_REMEDIES = {
    errno.ENOSPC: f"free space on its disk, or {_ANOTHER}",
    errno.EDQUOT: f"free space within the quota of its disk, or {_ANOTHER}",
    errno.EFBIG: f"raise the limit on the size of files (ulimit -f), or {_ANOTHER}",
    errno.EROFS: f"its file system is mounted read-only; {_ANOTHER}",
}
# Only with a file name: without one, anything may have been refused.
_REFUSED = (errno.EACCES, errno.EPERM)
# safetensors and tokenizers are written in Rust.
_OF_RUST = re.compile(r"\(os error (\d+)\)")
# The messages of SQLite and Ray.
_FULL = re.compile("database or disk is full|the local disk's utilization is over capacity")
# `torch.save` compares the number of written bytes and gives no reason.
_CUT_SHORT = re.compile(
    r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing|iostream error|^write\(\): fd \d+ failed with"
)
# Python's error when it finds no folder for temporary files.
_NO_FOLDER = re.compile(r"No usable temporary directory found in \[(.*)\]")


def sentence_of(error: BaseException, *, path: Path | str | None = None) -> str | None:
    """Return a sentence if an error, or its cause, says that a file could not be written; None for other errors.

    Args:
        path: what was being written; None takes the file name of the error, if it has one.
    """
    for cause in _causes(error):
        named = cause.filename if isinstance(cause, OSError) and isinstance(cause.filename, str | bytes) else None
        number = _number(cause)
        file = path or (os.fsdecode(named) if named else "standard output or a file")
        if number in _REMEDIES:
            return f"{file}: cannot be written ({os.strerror(number)}); {_REMEDIES[number]}"
        if number is None and _CUT_SHORT.search(str(cause)):
            return f"{file}: cannot be written (only a part was written); {_REMEDIES[errno.ENOSPC]}"
        if folders := _NO_FOLDER.search(str(cause)):
            return f"temporary files: cannot be written in {folders[1]}; free space there, or set TMPDIR to another folder"
        if path is None and named and number in _REFUSED:
            return f"{os.fsdecode(named)}: cannot be opened ({os.strerror(number)}); change its permissions, or {_ANOTHER}"
    return None


def unwritable(path: Path | str, error: OSError) -> UserError:
    """Return the error for a file or folder that cannot be written, for any reason."""
    return UserError(sentence_of(error, path=path) or f"{path}: cannot be written ({error.strerror}); {_ANOTHER}")


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Raise UserError about `path` if its disk is full; other errors pass."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each library has its own error for a full disk
        sentence = sentence_of(error, path=path)
        if sentence is None:
            raise
        raise UserError(sentence) from error


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if found := _OF_RUST.search(str(error)):
        return int(found[1])
    return errno.ENOSPC if _FULL.search(str(error)) else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; for an error from a Ray worker, first the worker's own error."""
    while error is not None:
        raised = getattr(error, "cause", None)
        if isinstance(raised, BaseException):
            yield from _causes(raised)
        yield error
        error = error.__cause__


def in_worker(error: BaseException) -> BaseException:
    """Return the error that a Ray worker has raised: Ray's own names the tasks that it came through, in colour."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error


def check_creatable(path: Path, *, flag: str) -> None:
    """Raise UserError if `path` could not be created: below a file, or in a folder without write permission."""
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise UserError(f"{flag} {path}: cannot be written, because {nearest} is a file; choose another place")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{flag} {path}: there is no permission to write to {nearest}; choose another place")


def check_output_file(path: Path, *, flag: str) -> None:
    """Raise UserError if no file can be written at `path`."""
    check_creatable(path, flag=flag)
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder; name a file")


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
                for file in _opened_to_others(partial):
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
        folder = path.with_name(f".{path.name}-{uuid4().hex}")
        folder.mkdir(parents=True)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with writing(path):
            yield folder
        _opened_to_others(folder)
        if path.exists():
            path.rmdir()
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _opened_to_others(folder: Path) -> list[Path]:
    """Return the files below a folder, with the modes that the umask gives; safetensors writes for the owner alone."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for file in files:
        file.chmod(folder.stat().st_mode & 0o666)
    return files


# The errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def own_folder(name: str) -> Path | None:
    """Return a folder for temporary files that only this user can write to; None if its place is somebody else's."""
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Not through a link, by which another user would have files deleted or emptied elsewhere.
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_own else None


def lock_of(output: Path) -> Path:
    """Return the lock file of an output whose folder must not change before there is something to write.

    Raises UserError if it cannot be among the temporary files.
    """
    name = hashlib.sha256(os.path.abspath(output).encode()).hexdigest()[:32]
    try:
        folder = own_folder("lmm-r1-locks")
    except OSError as error:
        raise unwritable(Path(tempfile.gettempdir()), error) from error
    if folder is None:
        raise UserError(
            f"{tempfile.gettempdir()}/lmm-r1-locks-{os.getuid()}: another user can write there; set TMPDIR to a folder of your "
            "own, or delete it"
        )
    return folder / name


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
