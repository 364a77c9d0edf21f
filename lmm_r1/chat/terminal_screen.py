"""The screen of a terminal: thinking is dim, the answer is bold and coloured, remarks stand back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.segment import Segment, Segments
from rich.spinner import Spinner
from rich.style import Style
from rich.table import Table
from rich.text import Text

from lmm_r1.chat.captured_output import Streams
from lmm_r1.chat.screen import AnswerWriter, neutral, one_line
from lmm_r1.chat.tagged_text import Kind, Span, TagReader

_REMARK = Style(dim=True)
_ERROR = Style(color="red")
_NAME = Style(color="cyan")
_STYLES: dict[Kind, Style] = {
    "text": Style.null(),
    "thinking": Style(dim=True, italic=True),
    "answer": Style(bold=True, color="green"),
    "tag": Style(dim=True, color="blue"),
}


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
