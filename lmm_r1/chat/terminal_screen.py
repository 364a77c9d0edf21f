"""The screen of a terminal: thinking is dim, the answer is bold and coloured, remarks stand back.

A streamed answer is cut into thinking, answer and tags wherever the pieces of the stream end.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.segment import Segment, Segments
from rich.spinner import Spinner
from rich.style import Style
from rich.table import Table
from rich.text import Text

from lmm_r1.chat.screen import AnswerWriter, Streams, neutral, one_line

Kind = Literal["text", "thinking", "answer", "tag"]

# What follows each tag; a closing tag without its opening one counts as well.
_FOLLOWED_BY: dict[str, Kind] = {
    "<think>": "thinking",
    "</think>": "text",
    "<answer>": "answer",
    "</answer>": "text",
}
_TAG = re.compile("|".join(map(re.escape, _FOLLOWED_BY)))
_REMARK = Style(dim=True)
_ERROR = Style(color="red")
_NAME = Style(color="cyan")
_STYLES: dict[Kind, Style] = {
    "text": Style.null(),
    "thinking": Style(dim=True, italic=True),
    "answer": Style(bold=True, color="green"),
    "tag": Style(dim=True, color="blue"),
}


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


class TerminalScreen:
    """Writes with rich; lines of running text are left to the terminal to wrap, so that they can be copied whole."""

    def __init__(self, streams: Streams) -> None:
        self._console = Console(file=streams.out, highlight=False, emoji=False, markup=False)

    def say(self, text: str) -> None:
        self._write(neutral(text), _REMARK)
        self._write("\n")

    def fail(self, sentence: str) -> None:
        self._write(one_line(sentence), _ERROR)
        self._write("\n")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in rows:
            grid.add_row(Text(neutral(name), style=_NAME), Text(neutral(text), style=_REMARK))
        self._console.print(grid)

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        # With `redirect_*` what libraries print would be taken onto this screen.
        spinner = Spinner("dots", text=Text(one_line(what), style=_REMARK))
        with Live(spinner, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield

    def answer(self, *, thinking: bool) -> AnswerWriter:
        return _StyledAnswer(self, TagReader(kind="thinking" if thinking else "text"))

    def show(self, span: Span) -> None:
        """Show a stretch of an answer."""
        self._write(neutral(span.text), _STYLES[span.kind])

    def end_line(self) -> None:
        """Go on to the next line."""
        self._write("\n")

    def _write(self, text: str, style: Style | None = None) -> None:
        # Not cut where the screen ends: the terminal goes on in the next line by itself.
        self._console.print(Segments([Segment(text, style)]), end="", crop=False)


class _StyledAnswer:
    def __init__(self, screen: TerminalScreen, reader: TagReader) -> None:
        self._screen = screen
        self._reader = reader
        self._ends_line = True

    def write(self, piece: str) -> None:
        self._show(self._reader.feed(piece))

    def close(self) -> None:
        self._show(self._reader.rest())
        if not self._ends_line:
            self._screen.end_line()

    def _show(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._screen.show(span)
            self._ends_line = span.text.endswith("\n")
