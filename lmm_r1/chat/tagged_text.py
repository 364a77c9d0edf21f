"""A streamed answer cut into thinking, answer and tags, wherever the pieces of the stream end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "thinking", "answer", "tag"]

# What follows each tag; a closing tag without its opening one counts as well.
_FOLLOWED_BY: dict[str, Kind] = {
    "<think>": "thinking",
    "</think>": "text",
    "<answer>": "answer",
    "</answer>": "text",
}
_TAG = re.compile("|".join(map(re.escape, _FOLLOWED_BY)))


@dataclass(frozen=True)
class Span:
    """A stretch of one kind."""

    kind: Kind
    text: str


class TagReader:
    """Takes a text piece by piece and gives it back as spans whose concatenation is the text."""

    def __init__(self, *, kind: Kind = "text") -> None:
        self._kind: Kind = kind
        self._held = ""

    def feed(self, piece: str) -> list[Span]:
        """Return the spans that are certain now; an end that may yet become a tag is held back."""
        text = self._held + piece
        spans: list[Span] = []
        start = 0
        for tag in _TAG.finditer(text):
            self._add(spans, text[start : tag.start()])
            spans.append(Span("tag", tag.group()))
            self._kind = _FOLLOWED_BY[tag.group()]
            start = tag.end()
        end = len(text) - _length_of_tag_start(text[start:])
        self._add(spans, text[start:end])
        self._held = text[end:]
        return spans

    def rest(self) -> list[Span]:
        """Return what was held back, when no piece follows."""
        spans: list[Span] = []
        self._add(spans, self._held)
        self._held = ""
        return spans

    def _add(self, spans: list[Span], text: str) -> None:
        if text:
            spans.append(Span(self._kind, text))


def _length_of_tag_start(text: str) -> int:
    """Return how many characters at the end of a text without tags may begin one: 4 of "ab</th"."""
    start = text.rfind("<")
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in _FOLLOWED_BY) else 0
