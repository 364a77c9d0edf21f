"""Text that grows token by token, handed out in whole characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a tokenizer writes for bytes that are no whole character yet.
_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns the tokens of one response into pieces of text, which together are the decoded response.

    Where the tokens do not make up whole characters, the marks that stand for the broken ones may differ.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Text of the tokens before `_read` is out; decoding starts at `_from`, as a token's text depends on the one before.
        self._from = 0
        self._read = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; empty in the middle of a character."""
        self._ids.extend(token_ids)
        known, text = self._decoded(self._read), self._decoded(len(self._ids))
        if text.endswith(_INCOMPLETE) or len(text) <= len(known):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def rest(self) -> str:
        """Return the text that was held back, when no token follows."""
        known, text = self._decoded(self._read), self._decoded(len(self._ids))
        self._from = self._read = len(self._ids)
        return text[len(known) :]

    def _decoded(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._from : end], skip_special_tokens=False)
