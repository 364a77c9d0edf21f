"""Where a chat writes: the screens for terminals and for pipes, with text made safe for terminals.

What libraries write to stdout and stderr is kept off the screen, and shown only if the program fails."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.segment import Segment, Segments
from rich.spinner import Spinner
from rich.style import Style
from rich.table import Table
from rich.text import Text

from lmm_r1.errors import UserError
from remote_rm.redaction import neutral

_TOLD_BYTES = 4000


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The stdout and stderr that the user sees."""

    out: TextIO
    err: TextIO


@contextlib.contextmanager
def captured_output() -> Iterator[Streams]:
    """Redirect file descriptors 1 and 2 to a temporary file, and yield streams to their original targets.

    Native code and child processes write to the descriptors instead of `sys.stdout`. If an unexpected error ends the
    program, the last part of what was captured is written before the traceback.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with tempfile.TemporaryFile() as kept:
        for descriptor in saved:
            os.dup2(kept.fileno(), descriptor)
        streams = Streams(out=_stream(saved[1]), err=_stream(saved[2]))
        try:
            yield streams
        except (UserError, KeyboardInterrupt):
            raise
        except BrokenPipeError:
            # Discard what is still in a buffer, because it has no reader.
            with open(os.devnull, "wb") as nowhere:
                for original in saved.values():
                    os.dup2(nowhere.fileno(), original)
            raise
        except Exception:  # unexpected: show what libraries wrote, and raise it again
            sys.stdout.flush()
            kept.seek(max(0, kept.seek(0, os.SEEK_END) - _TOLD_BYTES))
            os.write(saved[2], kept.read())
            raise
        finally:
            for stream in (streams.out, streams.err, sys.stdout, sys.stderr):
                stream.flush()
            for descriptor, original in saved.items():
                os.dup2(original, descriptor)
                os.close(original)


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)


class AnswerWriter(Protocol):
    """Takes one answer while it is generated; `close` ends its last line."""

    def write(self, piece: str) -> None: ...

    def close(self) -> None: ...


class Screen(Protocol):
    """Shows answers, messages of commands and errors, without letting control characters through."""

    def say(self, text: str) -> None: ...

    def fail(self, sentence: str) -> None: ...

    def table(self, rows: Sequence[tuple[str, str]]) -> None: ...

    def loading(self, what: str) -> AbstractContextManager[None]: ...

    def answer(self, *, thinking: bool) -> AnswerWriter:
        """Begin an answer; `thinking` if the prompt has already opened the first thought."""


class PlainScreen:
    """Answers on stdout, separated by empty lines; everything else on stderr."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.has_answers = False
        """Whether the next answer needs an empty line before it."""

    def say(self, text: str) -> None:
        print(neutral(text), file=self._streams.err, flush=True)

    def fail(self, sentence: str) -> None:
        print(f"error: {one_line(sentence)}", file=self._streams.err, flush=True)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        self.say("\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows))

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        if self._streams.err.isatty():
            self.say(f"{what} ...")
        yield

    def answer(self, *, thinking: bool) -> AnswerWriter:
        return _PlainAnswer(self)

    def write(self, text: str) -> None:
        self._streams.out.write(text)
        self._streams.out.flush()


class _PlainAnswer:
    def __init__(self, screen: PlainScreen) -> None:
        self._screen = screen
        self._is_empty = True
        self._ends_line = True

    def write(self, piece: str) -> None:
        if self._is_empty and self._screen.has_answers:
            self._screen.write("\n")
        self._is_empty = False
        self._screen.has_answers = True
        self._screen.write(neutral(piece))
        self._ends_line = piece.endswith("\n")

    def close(self) -> None:
        if not self._ends_line:
            self._screen.write("\n")


def one_line(text: str) -> str:
    """Return neutral text on a single line."""
    return " ".join(neutral(text).split())


Kind = Literal["text", "thinking", "answer", "tag"]

# The kind of text after each tag; a closing tag counts even without its opening one.
_FOLLOWED_BY: dict[str, Kind] = {"<think>": "thinking", "</think>": "text", "<answer>": "answer", "</answer>": "text"}
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
class StyledSpan:
    kind: Kind
    text: str


class TagReader:
    """Splits a text that arrives in pieces into spans, whose concatenation is the text."""

    def __init__(self, *, kind: Kind = "text") -> None:
        self._kind: Kind = kind
        self._held = ""

    def feed(self, piece: str) -> list[StyledSpan]:
        """Return the spans that are complete; an end that may become a tag is held back."""
        text = self._held + piece
        spans: list[StyledSpan] = []
        start = 0
        for tag in _TAG.finditer(text):
            self._add(spans, text[start : tag.start()])
            spans.append(StyledSpan("tag", tag.group()))
            self._kind = _FOLLOWED_BY[tag.group()]
            start = tag.end()
        end = len(text) - _length_of_tag_start(text[start:])
        self._add(spans, text[start:end])
        self._held = text[end:]
        return spans

    def rest(self) -> list[StyledSpan]:
        """Return what was held back, after the last piece."""
        spans: list[StyledSpan] = []
        self._add(spans, self._held)
        self._held = ""
        return spans

    def _add(self, spans: list[StyledSpan], text: str) -> None:
        if text:
            spans.append(StyledSpan(self._kind, text))


def _length_of_tag_start(text: str) -> int:
    """Return how many characters at the end of a text without tags may begin one: 4 of "ab</th"."""
    start = text.rfind("<")
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in _FOLLOWED_BY) else 0


class TerminalScreen:
    """Writes with rich; the terminal wraps running text, so that it can be copied as a whole."""

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
        # With `redirect_*`, what libraries print would appear on this screen.
        spinner = Spinner("dots", text=Text(one_line(what), style=_REMARK))
        with Live(spinner, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield

    def answer(self, *, thinking: bool) -> AnswerWriter:
        return _StyledAnswer(self, TagReader(kind="thinking" if thinking else "text"))

    def show(self, span: StyledSpan) -> None:
        self._write(neutral(span.text), _STYLES[span.kind])

    def end_line(self) -> None:
        self._write("\n")

    def _write(self, text: str, style: Style | None = None) -> None:
        # Without cropping: the terminal wraps long lines itself.
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

    def _show(self, spans: Sequence[StyledSpan]) -> None:
        for span in spans:
            self._screen.show(span)
            self._ends_line = span.text.endswith("\n")
