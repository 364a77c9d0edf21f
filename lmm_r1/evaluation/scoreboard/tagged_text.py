"""A response in the parts that its tags make: the thought, the answer, and what stands outside of both."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_PART = re.compile(r"(<(think|answer)>)(.*?)(</\2>|\Z)", re.DOTALL)
_THOUGHT_ENDS = "</think>"


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """A stretch of a response."""

    kind: Literal["think", "answer", "other"]
    opening: str
    """Its tag; empty where it has none."""
    text: str
    closing: str
    """Empty as well where the response ends before it."""


def text_parts(text: str) -> list[TextPart]:
    """Return the parts of a response, which together are the response.

    Where a chat template has already opened the thought, the response starts inside it.
    """
    head, ends, rest = text.partition(_THOUGHT_ENDS)
    parts = []
    if ends and "<think>" not in head and "<answer>" not in head:
        parts.append(TextPart(kind="think", opening="", text=head, closing=ends))
        text = rest
    place = 0
    for found in _PART.finditer(text):
        parts.append(TextPart(kind="other", opening="", text=text[place : found.start()], closing=""))
        opening, name, inside, closing = found.groups()
        kind: Literal["think", "answer"] = "think" if name == "think" else "answer"
        parts.append(TextPart(kind=kind, opening=opening, text=inside, closing=closing))
        place = found.end()
    parts.append(TextPart(kind="other", opening="", text=text[place:], closing=""))
    return [part for part in parts if part.kind != "other" or part.text]
