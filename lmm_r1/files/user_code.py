"""A user's own Python file as a module."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from lmm_r1.errors import UserError

_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "latex2sympy2": "latex2sympy2-extended",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages with another name than their module."""


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
    # As of a script, so that it can import the modules next to it.
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
        place, said = failure(error, modules=(name,))
        see = f", see{place}" if place else ""
        raise UserError(
            f"{what} {path}: the file cannot be imported ({said}); correct it{see}{advice(error)}"
        ) from error
    return module


def advice(error: BaseException) -> str:
    """Return how to install the package that an error says is missing; empty for other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    return f"; install it where the run starts, with pip install {_PACKAGES.get(package, package.replace('_', '-'))}"


def failure(error: BaseException, *, modules: Collection[str]) -> tuple[str, str]:
    """Return where the user's code raised an error, as ` FILE, line N`, and the error's name and message.

    The place is empty if the error did not pass through the user's code.

    Args:
        modules: the names of the modules that hold the user's code.
    """
    places = [
        f" {frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in modules
    ]
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return (places or [""])[-1], said
