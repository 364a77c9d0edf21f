"""Environments by name, and from a user's file."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lmm_r1 import dotted
from lmm_r1.agents.environment import Environment
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import load_user_file

# Module and class; imported on use.
ENVIRONMENTS: dict[str, str] = {
    "crop": "lmm_r1.agents.tool_environment:CropEnvironment",
    "tool": "lmm_r1.agents.tool_environment:ToolEnvironment",
    "sokoban": "lmm_r1.agents.sokoban:SokobanSteps",
    "sokoban-plan": "lmm_r1.agents.sokoban:SokobanPlan",
    "gymnasium": "lmm_r1.agents.gymnasium:GymnasiumEnvironment",
    "single": "lmm_r1.agents.environment:SingleTurn",
}
TOOLS = "TOOLS"
"""The variable with the tools of a file without an environment."""
_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>\w+))?")


def load_environment(source: str, *, options: Mapping[str, Any] | None = None) -> Environment:
    """Return an environment by its name, or from a user's file.

    Args:
        source: a name; `FILE.py`, which defines one subclass or instance of `Environment`, or a list `TOOLS` of functions;
            or `FILE.py:NAME`, a class or an instance in it.
        options: arguments of the class's constructor.

    Raises:
        UserError: there is no such environment, or it cannot be created with these options.
    """
    options = options or {}
    if file := _FILE.fullmatch(source):
        return _from_file(file["path"], name=file["name"], options=options, source=source)
    if source not in ENVIRONMENTS:
        near = dotted.nearest(source, known=ENVIRONMENTS)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(
            f"no environment {source!r}; {hint}Known are {', '.join(ENVIRONMENTS)}, and FILE.py with your own"
        )
    return _made(_shipped(source), options=options, source=source)


def _shipped(name: str) -> Callable[..., Environment]:
    module, _, class_name = ENVIRONMENTS[name].partition(":")
    return getattr(importlib.import_module(module), class_name)


def _made(made: Callable[..., Environment], *, options: Mapping[str, Any], source: str) -> Environment:
    known = list(inspect.signature(made).parameters)
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"environment {source}: no option {unknown[0]!r}; known are {', '.join(known) or 'none'}")
    try:
        return made(**options)
    except UserError as error:
        raise UserError(f"environment {source}: {error}") from error
    except Exception as error:  # the user's own code, which may raise anything
        raise UserError(
            f"environment {source}: it cannot be created with the options {dict(options)} ({type(error).__name__}: {error})"
        ) from error


def _from_file(path: str, *, name: str | None, options: Mapping[str, Any], source: str) -> Environment:
    module = load_user_file(path, name=f"agent_file_{Path(path).stem}", what="environment")
    if name is None:
        found = _candidates(module)
        if not found and isinstance(getattr(module, TOOLS, None), (list, tuple)):
            return _made(partial(_shipped("tool"), getattr(module, TOOLS)), options=options, source=source)
        if not found:
            raise UserError(
                f"{path}: the file defines no Environment, and no list TOOLS of functions; subclass "
                "lmm_r1.agents.environment.Environment"
            )
        if len(found) > 1:
            raise UserError(f"{path}: the file defines {', '.join(found)}; say which: {path}:{found[0]}")
        name = found[0]
    chosen = getattr(module, name, None)
    if isinstance(chosen, Environment):
        if options:
            raise UserError(f"{path}: {name} is an instance and takes no options; name a class instead")
        return chosen
    if not isinstance(chosen, type) or not issubclass(chosen, Environment):
        raise UserError(f"{path}: {name} is not an Environment; subclass lmm_r1.agents.environment.Environment")
    return _made(chosen, options=options, source=source)


def _candidates(module: ModuleType) -> list[str]:
    """Return the names of a file's own environments: the instances, or else the classes."""
    values = vars(module).items()
    if made := [name for name, value in values if isinstance(value, Environment)]:
        return made
    return [
        name
        for name, value in values
        if isinstance(value, type)
        and issubclass(value, Environment)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
