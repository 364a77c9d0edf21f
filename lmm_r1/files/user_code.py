"""A user's own Python file as a module, and what `FILE.py:NAME?option=value` names in it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NewType
from urllib.parse import parse_qsl

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
UserFunction = NewType("UserFunction", str)
"""A function of a user's file, `FILE.py:NAME?option=value&option=value`, next to the names of a `Literal`."""


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


_FUNCTION = re.compile(r"(?P<path>[^?]+\.py)(?::(?P<name>[A-Za-z_]\w*))?(?:\?(?P<options>.*))?")


def function_file(text: str) -> str | None:
    """Return the file in `FILE.py:NAME?option=value`; None for a text of another form."""
    form = _FUNCTION.fullmatch(text)
    return form and form["path"]


def module_of(default: str) -> str:
    """Return the name of the module that a file becomes whose function is called `default` unless a flag names another."""
    return f"user_{default}"


def find_user_function(text: str, *, default: str, flag: str) -> Callable[..., Any]:
    """Return the function or class that `FILE.py:NAME?option=value&option=value` names, with these options.

    Options are Python literals or text, and are bound to the function's keyword-only parameters.

    Args:
        default: the function's name if the text has none.

    Raises:
        UserError: the file cannot be imported, or has no such function with these options.
    """
    form = _FUNCTION.fullmatch(text)
    if form is None:
        raise UserError(f"{flag} {text} names no file; give it as FILE.py or FILE.py:{default}")
    name = form["name"] or default
    function = getattr(load_user_file(form["path"], name=module_of(default), what=flag), name, None)
    if not callable(function):
        raise UserError(f"{flag} {text}: the file defines no {name}; add it, or name another as {form['path']}:NAME")
    options = {option: _literal(value) for option, value in parse_qsl(form["options"] or "", keep_blank_values=True)}
    # A built-in class has no signature.
    parameters = inspect.signature(function).parameters.values() if options else ()
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    if unknown := sorted(options.keys() - known):
        told = ", ".join(known) or "none"
        raise UserError(f"{flag} {text}: {name} has no keyword-only parameter {unknown[0]}; known are {told}")
    return partial(function, **options) if options else function


def load_user_function(text: str, *, default: str, flag: str) -> Callable[..., Any]:
    """Return `find_user_function`'s function; it raises UserError, with file and line, if the user's code raises."""
    function = find_user_function(text, default=default, flag=flag)

    @contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the user's own code, which may raise anything
            place, said = failure(error, modules=(module_of(default),))
            raise UserError(f"{flag} {text}: it raised {said}{place and f', at{place}'}{advice(error)}") from error

    def each(made: Iterator[Any]) -> Iterator[Any]:
        with told():
            yield from made

    def called(*given: object) -> Any:
        with told():
            made = function(*given)
        return each(made) if inspect.isgenerator(made) else made

    return called


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


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
