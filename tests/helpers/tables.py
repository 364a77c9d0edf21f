"""Cases of tests: tables in tests/data, the commands of a page of the docs, and the settings that each kit is tested with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lmm_r1.cli.kits import COLUMNS, kit_rows

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


ROOT = Path(__file__).resolve().parents[2]


def commands_of(page: str | Path) -> list[list[list[str]]]:
    """For each block of bash the commands in it, as lists of words; a page is named from the repository's root on."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    joined = [block.replace("\\\n", " ").splitlines() for block in blocks]
    return [[words for line in lines if (words := shlex.split(line, comments=True))] for lines in joined]


SOME = frozenset({"gemma3", "phi4_multimodal", "qwen2_5_vl", "qwen3_5"})
"""The kits that tests of several kits are run with on every commit; all others are marked `full`.

They differ most: bidirectional attention to images, adapters that images switch on, M-RoPE, layers of the delta rule.
"""


def by_turns(names: Iterable[str], settings: Sequence[tuple], *, turns: int) -> list[tuple]:
    """Return cases (name, *setting): all settings for Qwen2.5-VL, and every `turns`-th for each of the others.

    Kits that follow each other begin with other settings, so that `turns` of them have them all between them.
    """
    return [
        (name, *setting)
        for turn, name in enumerate(names)
        for number, setting in enumerate(settings)
        if name == "qwen2_5_vl" or number % turns == turn % turns
    ]


@cache
def kits_with(column: str) -> tuple[str, ...]:
    """Return the kits that have a `yes` in a column of `lmm-r1 kits`: the contracts that show it are asked of all of them."""
    place = COLUMNS.index(column)
    return tuple(row[0] for row in kit_rows(vllm_version="") if row[place] == "yes")
