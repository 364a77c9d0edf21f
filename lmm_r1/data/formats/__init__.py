"""The formats in which rows come, by name, and which of them a file has.

A new format is a `RowFormat` in the registry, its name in `FormatName`, and a sample in `datasets/samples/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from lmm_r1.data.formats.chats import CHATS
from lmm_r1.data.formats.problems import PROBLEMS
from lmm_r1.data.formats.responses import RESPONSES
from lmm_r1.data.formats.row_format import RowFormat
from lmm_r1.errors import UserError

FormatName: TypeAlias = Literal[
    "lmm_r1",
    "easyr1",
    "r1_v",
    "r1_vlm",
    "mini_o3",
    "mini_o3_cold_start",
    "sharegpt",
    "llava",
    "vlmeval",
    "pairs",
    "preference",
]

FORMATS: dict[str, RowFormat] = {row_format.name: row_format for row_format in (*CHATS, *PROBLEMS, *RESPONSES)}
OWN = FORMATS["lmm_r1"]
"""The format of this project's own rows, and of a file whose prompts are in a column that the user named."""


def find_format(columns: Iterable[str], *, file: str) -> RowFormat:
    """Return the one format that a file with these columns has; this project's own where none fits.

    Raises:
        UserError: several fit.
    """
    names = set(columns)
    fitting = [row_format for row_format in FORMATS.values() if row_format.fits(names)]
    if len(fitting) > 1:
        choices = " and ".join(f"{row_format.name} ({row_format.wants})" for row_format in fitting)
        raise UserError(f"{file}: its columns fit the row formats {choices}; choose one with --data.format")
    return fitting[0] if fitting else OWN
