"""The row formats by name, and detection of a file's format.

A new format is a `RowFormat` in the registry, its name in `config.shared.FormatName`, and a sample in `datasets/samples/`.
"""

from __future__ import annotations

from lmm_r1.data.formats.chats import CHATS
from lmm_r1.data.formats.judged import RESPONSES
from lmm_r1.data.formats.problems import PROBLEMS
from lmm_r1.data.formats.row_format import FormatSet, RowFields, RowFormat

FORMATS: dict[str, RowFormat[RowFields]] = {
    row_format.name: row_format for row_format in (*CHATS, *PROBLEMS, *RESPONSES)
}
OWN = FORMATS["lmm_r1"]
"""The format of this project's own rows, and of files whose prompt column the user named."""
_KEYS = ("input_key", "label_key", "image_key")
# Of TRL and of LLaMA-Factory.
_VERDICTS = (frozenset(("prompt", "completion", "label")), frozenset(("kto_tag",)))
PROMPT_ROWS = FormatSet(formats=tuple(FORMATS.values()), own=OWN, refused=_VERDICTS, keys=_KEYS)
"""Rows that RL samples from and SFT trains on."""
