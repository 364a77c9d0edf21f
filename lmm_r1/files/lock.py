"""A lock on an output that two processes must not write at the same time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmm_r1.errors import UserError

# What file systems without locks answer.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path, *, output: str) -> Iterator[None]:
    """Keep other processes out of an output while the block runs; the lock ends with the process, however it ends.

    Where the file system has no locks, the block runs without one.

    Args:
        path: of the lock file, which stays. It names the process that holds the lock.
        output: the flag and what it names, for messages.

    Raises:
        UserError: another process holds the lock, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); choose another place") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"{output}: {holder} is writing it; wait until it ends, or choose another place"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
