"""Errors of a full disk: turns what Python and libraries raise into one sentence with the file."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

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
    return UserError(
        sentence_of(error, path=path) or f"{path}: cannot be written ({error.strerror}); {_ANOTHER}",
    )


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
    """Return the system's number of an error, None if it has none."""
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
