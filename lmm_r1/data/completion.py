"""A response as an engine gave it."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "aborted"]
"""The model ended it, it reached its limit, or the user stopped it."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response."""

    text: str
    """Without the end token."""
    num_tokens: int
    """The end token counts."""
    finish_reason: FinishReason
