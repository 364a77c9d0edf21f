"""Environments by name, and those of a user's own file."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from lmm_r1.agents.environment import Environment
from lmm_r1.errors import UserError

_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>\w+))?")


def load_environment(name: str) -> Environment:
    """Return an environment by its name, or of `FILE.py` or `FILE.py:CLASS`; raises UserError where there is none."""
    match = _FILE.fullmatch(name)
    if match is None:
        raise UserError(f"--train.agent {name}: no such environment; give FILE.py:CLASS")
    path = Path(match["path"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"--train.agent {name}: no such file; check the path")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Environment)]
    own = [value for value in found if value.__module__ == module.__name__ and match["name"] in (None, value.__name__)]
    if len(own) != 1:
        raise UserError(f"--train.agent {name}: the file has {len(own)} such environments; name one as FILE.py:CLASS")
    return own[0]()
