"""Cases of tests that are data: tables in YAML, one file per module of tests."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "data" / "tables"


@cache
def _tables(module: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{module}.yaml").read_text(encoding="utf-8"))


def table(module: str, name: str) -> Any:
    """Return a table of a module of tests: a list, in which a row of several cells is a tuple, or a mapping."""
    rows = _tables(module)[name]
    return [tuple(row) if isinstance(row, list) else row for row in rows] if isinstance(rows, list) else dict(rows)


def frozen(module: str, name: str) -> tuple[Any, ...]:
    """Return a table of a module of tests in which every list, however deep, is a tuple."""
    return _as_tuples(_tables(module)[name])


def _as_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_as_tuples, value))
    return {key: _as_tuples(part) for key, part in value.items()} if isinstance(value, dict) else value
