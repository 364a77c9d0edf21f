"""What the user enters: at a prompt with a history in a terminal, or line by line from a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import is_dumb_terminal

from lmm_r1.chat.commands import COMMANDS, SIGN
from lmm_r1.chat.sampling import NAMES

CONTINUED = "\\"


def continues(line: str) -> bool:
    """Say whether a line goes on in the next one: it ends with a backslash that is not one of a pair."""
    return (len(line) - len(line.rstrip(CONTINUED))) % 2 == 1


def piped_lines() -> Iterator[str]:
    """Yield the lines of stdin, with those that end with a backslash joined to the next."""
    assert isinstance(sys.stdin, io.TextIOWrapper), "Python opens it as one"
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")
    entry = ""
    for line in sys.stdin:
        entry += line.rstrip("\r\n")
        if continues(entry):
            entry = entry[:-1] + "\n"
            continue
        yield entry
        entry = ""
    if entry:
        yield entry.rstrip("\n")


def prompted_lines(out: TextIO, *, history: Path | None, before: Callable[[], str]) -> Iterator[str]:
    """Yield what is entered at the prompt until Ctrl-D; Ctrl-C clears the line."""
    if is_dumb_terminal():
        yield from _typed_lines(out, before=before)
        return
    kept: History = InMemoryHistory() if history is None else FileHistory(str(history))
    session: PromptSession[str] = PromptSession(
        output=create_output(stdout=out),
        history=kept,
        completer=LineCompleter(),
        complete_while_typing=False,
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=lambda width, line_number, wrapped: "" if wrapped else f"{'.' * (width - 1)} ",
    )
    while True:
        try:
            yield session.prompt([("bold", before())])
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _typed_lines(out: TextIO, *, before: Callable[[], str]) -> Iterator[str]:
    """Do without what a terminal that knows no cursor (TERM=dumb) cannot do."""
    entry = ""
    while True:
        out.write(". " if entry else before())
        out.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            out.write("\n")
            entry = ""
            continue
        if not line:
            out.write("\n")
            return
        entry += line.rstrip("\n")
        if continues(entry):
            entry = entry[:-1] + "\n"
            continue
        yield entry
        entry = ""


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif buffer.document.is_cursor_at_the_end and continues(buffer.text):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class LineCompleter(Completer):
    """What the Tab key offers: commands, files behind those that take one, and names of settings."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Give what may stand where the cursor is."""
        line = document.text_before_cursor
        if not line.startswith(SIGN) or "\n" in line:
            return
        name, space, argument = line.partition(" ")
        if not space:
            for known, command in COMMANDS.items():
                if known.startswith(name):
                    text = f"{known} " if command.argument else known
                    yield Completion(text, start_position=-len(name), display=known, display_meta=command.help)
        elif name == "/set" and " " not in argument:
            yield from (
                Completion(known, start_position=-len(argument)) for known in NAMES if known.startswith(argument)
            )
        elif name in COMMANDS and COMMANDS[name].takes_path:
            typed = argument.lstrip("'\"")
            yield from self._paths.get_completions(Document(typed, len(typed)), complete_event)


def private_file(path: Path) -> Path:
    """Return a file, made if need be, that no other user may read; raises OSError where it cannot be written."""
    file = path.expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    with file.open("ab"):
        return file
