"""How a name of OpenRLHF's is described that this project subclasses, replaces or uses."""

from dataclasses import dataclass
from typing import Literal

from lmm_r1.host.seams import REPLACEMENTS


@dataclass(frozen=True, kw_only=True)
class Seam:
    upstream: str
    """`module:name`, or `module:class.method`."""
    how: Literal["subclassed", "replaced", "used"]
    ours: str
    """`module:name` of what takes its place or builds on it."""
    reason: str
    signature: str
    """Parameter names of the callable or of the class's constructor, in order."""


def replaced(upstream: str, *, signature: str) -> Seam:
    """A name that `lmm_r1.host.seams` replaces, and says by what and why."""
    (known,) = (replacement for replacement in REPLACEMENTS if replacement.upstream == upstream)
    return Seam(upstream=upstream, how="replaced", ours=known.ours, reason=known.reason, signature=signature)
