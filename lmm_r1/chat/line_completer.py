"""What the Tab key offers: commands, files behind those that take one, and names of settings."""

from __future__ import annotations

from collections.abc import Iterable

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from lmm_r1.chat.commands import COMMANDS, SIGN
from lmm_r1.chat.sampling import NAMES


class LineCompleter(Completer):
    """Completes lines that begin with a slash."""

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
