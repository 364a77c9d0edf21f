"""A lock on an output that two processes must not write at the same time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lmm_r1.errors import UserError
from lmm_r1.files.full_disk import unwritable, writing

# What file systems without locks answer.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock_of(output: Path) -> Path:
    """Return the lock file of an output whose folder must stay as it is until there is something to write."""
    name = hashlib.sha256(os.path.abspath(output).encode()).hexdigest()[:32]
    return Path(tempfile.gettempdir()) / f"lmm-r1-locks-{os.getuid()}" / name


@contextmanager
def locked(path: Path, *, output: str) -> Iterator[None]:
    """Keep other processes out of an output while the block runs; the lock ends with the process, however it ends.

    Processes that this one starts do not hold it. Where the file system has no locks, the block runs without one.

    Args:
        path: of the lock file, which names the process that holds the lock.
        output: the flag and what it names, for messages.

    Raises:
        UserError: another process holds the lock, or the file cannot be written.
    """
    file = _held(path, output=output)
    with file:
        try:
            with writing(output):
                file.truncate(0)
                # Past Python's buffer, which a full disk would not take when the file is closed, either.
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
            # Of a process, unlike flock's, which its forks would hold after it was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have taken the file away in between.
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
