"""Files that are either complete or not there."""

import os
from pathlib import Path

from lmm_r1.errors import UserError


def check_creatable(path: Path, *, flag: str) -> None:
    """Raise UserError where `path` could not be made: under a file, or in a folder that may not be written to."""
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise UserError(f"{flag} {path}: cannot be written, as {nearest} is a file; choose another place")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{flag} {path}: {nearest} may not be written to; choose another place")


def write_atomically(path: Path, *, text: str) -> None:
    """Write a UTF-8 file under a temporary name beside it, then give it its own name; make its folder if need be.

    Raises UserError where nothing can be written.
    """
    # What a model wrote can hold half of a surrogate pair, which has no encoding.
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
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
