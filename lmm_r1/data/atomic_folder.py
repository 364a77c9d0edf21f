"""Folders that are either complete or not there."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmm_r1.data.atomic_file import check_creatable
from lmm_r1.errors import UserError


def check_new_folder(path: Path, *, flag: str) -> None:
    """Raise UserError where `path` is anything but a name that is free, or an empty folder, in a writable place."""
    check_creatable(path, flag=flag)
    if path.is_file():
        raise UserError(f"{flag} {path} is a file; name a folder")
    if path.exists() and any(path.iterdir()):
        raise UserError(f"{flag} {path} exists and is not empty; choose another folder")


@contextlib.contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path` to write into, which takes its place where nothing is raised inside.

    Raises UserError where nothing can be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    try:
        yield folder
        folder.chmod(0o755)
        if path.exists():
            path.rmdir()
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
