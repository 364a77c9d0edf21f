"""The names of OpenRLHF that this project subclasses, replaces or uses: `tests/data/openrlhf_names.yaml`, read and typed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from lmm_r1.host.seams import REPLACEMENTS


@dataclass(frozen=True, kw_only=True)
class Seam:
    upstream: str
    """`module:name`, or `module:class.method`."""
    how: Literal["subclassed", "replaced", "used"]
    ours: str
    """`module:name` of what takes its place or builds on it. `lmm_r1.host.seams` states it for a replaced name."""
    reason: str
    signature: str
    """Parameter names of the callable or of the class's constructor, in order."""


def _seam(row: dict[str, str]) -> Seam:
    if row["how"] != "replaced":
        return Seam(**row)
    (known,) = (replacement for replacement in REPLACEMENTS if replacement.upstream == row["upstream"])
    return Seam(**row, ours=known.ours, reason=known.reason)


_FILE = Path(__file__).resolve().parents[1] / "data" / "openrlhf_names.yaml"
SEAMS: tuple[Seam, ...] = tuple(
    _seam(row) for rows in yaml.safe_load(_FILE.read_text(encoding="utf-8")).values() for row in rows
)
