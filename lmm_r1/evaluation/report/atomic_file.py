"""Text files that are either complete or not there."""

import os
from pathlib import Path

from lmm_r1.errors import UserError


def write_atomically(path: Path, *, text: str) -> None:
    """Write a UTF-8 file under a temporary name beside it, then give it its own name; make its folder if need be."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the name of a file")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # What a model wrote can hold half of a surrogate pair, which has no encoding.
            partial.write_text(text, encoding="utf-8", errors="replace")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
