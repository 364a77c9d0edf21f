"""Where a chat writes to: what every screen does, and the plain one for pipes and files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from lmm_r1.chat.captured_output import Streams
from lmm_r1.chat.neutral_text import neutral, one_line


class AnswerWriter(Protocol):
    """Takes one answer while it is generated."""

    def write(self, piece: str) -> None:
        """Show the next piece of text."""

    def close(self) -> None:
        """End the last line."""


class Screen(Protocol):
    """Shows answers, what commands say, and what went wrong; lets nothing through that would move the cursor."""

    def say(self, text: str) -> None:
        """Show a remark of the program, of one or more lines."""

    def fail(self, sentence: str) -> None:
        """Show what went wrong, on one line."""

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show names with what belongs to them."""

    def loading(self, what: str) -> AbstractContextManager[None]:
        """Show that the program is busy."""

    def answer(self, *, thinking: bool) -> AnswerWriter:
        """Begin an answer; `thinking` where the prompt has opened the first thought already."""


class PlainScreen:
    """Answers on stdout, an empty line between two; everything else on stderr."""

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
        """Write a part of an answer."""
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
