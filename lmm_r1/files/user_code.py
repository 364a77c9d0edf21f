"""A user's own Python file as a module."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from lmm_r1.errors import UserError


def load_user_file(path: str, *, name: str, what: str) -> ModuleType:
    """Import a file as the module `name`.

    Args:
        what: the flag that names the file, for messages.

    Raises:
            UserError: the file does not exist or cannot be imported.
    """
    if not Path(path).is_file():
        raise UserError(f"{what} {path}: no such file; check the path")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look up the file's module by its name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code, which may raise anything
        raise UserError(
            f"{what} {path}: the file cannot be imported ({type(error).__name__}: {error}); correct it"
        ) from error
    return module


def raised_at(error: BaseException, *, modules: Collection[str]) -> tuple[str, int] | None:
    """Return the file and line of the user's code that raised an error, None if it did not pass through any.

    Args:
        modules: the names of the modules that hold the user's code.
    """
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in modules
    ]
    return frames[-1] if frames else None
