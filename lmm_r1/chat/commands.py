"""The commands of a chat, which begin with a slash, and how its lines are read."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import is_dumb_terminal

from lmm_r1.chat.conversation import NAMES, changed, is_saved_conversation, load, save, saved_path
from lmm_r1.chat.session import ChatSession, read_image, read_video, sources_of
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError

SIGN = "/"
WORDS = {"exit": "/exit", "quit": "/exit"}
"""Lines that are commands without a slash, as in other programs."""
_NO_TEXT = ('""', "''")
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the chat."""

    argument: str
    """What follows it, for the help."""
    help: str
    run: Callable[[ChatSession, str], None]
    takes_path: bool = False


def run_command(session: ChatSession, line: str) -> None:
    """Run `/name argument`; raises UserError if that is not possible."""
    name, argument = (*line.split(maxsplit=1), "")[:2]
    if name not in COMMANDS:
        match = nearest(name, known=COMMANDS)
        hint = f"did you mean {match}?" if match else "/help lists them"
        raise UserError(f"unknown command {name}; {hint}")
    command, argument = COMMANDS[name], argument.strip()
    if argument and not command.argument:
        raise UserError(f"{name} takes no argument, but got {argument}")
    command.run(session, argument)


def attach_images(session: ChatSession, argument: str) -> None:
    """Attach all images that are named, or none if one is not available."""
    session.check_more(images=1)
    sources = sources_of(argument)
    session.check_more(images=len(sources))
    images = [read_image(source) for source in sources]
    session.attached += images
    for image in images:
        session.screen.say(f"attached {image}")


def _attach_videos(session: ChatSession, argument: str) -> None:
    session.check_more(videos=1)
    sources = sources_of(argument)
    session.check_more(videos=len(sources))
    videos = [read_video(source) for source in sources]
    session.attached += videos
    for video in videos:
        session.screen.say(f"attached {video}")


def _list_attached(session: ChatSession, argument: str) -> None:
    if session.attached:
        session.screen.table([(item.name, item.size) for item in session.attached])
    else:
        session.screen.say("nothing is attached; /image PATH attaches an image to the next message")


def _detach(session: ChatSession, argument: str) -> None:
    count, session.attached = len(session.attached), []
    session.screen.say(f"{count} detached" if count else "nothing was attached")


def _system(session: ChatSession, argument: str) -> None:
    if argument:
        session.conversation.set_system(None if argument in _NO_TEXT else argument)
    prompt = session.conversation.system
    if prompt is None:
        session.screen.say("no system prompt, except for what the checkpoint's chat template may add")
    else:
        session.screen.say(f'system prompt: {prompt}\n(/system "" removes it)')


def _set(session: ChatSession, argument: str) -> None:
    if argument:
        name, *values = argument.replace("=", " ").split()
        if len(values) != 1:
            raise UserError(f"write /set NAME VALUE; the names are {', '.join(NAMES)}")
        session.sampling = changed(session.sampling, name, values[0])
    session.screen.table([(name, f"{value:g}") for name, value in asdict(session.sampling).items()])


def _reset(session: ChatSession, argument: str) -> None:
    session.reset()
    kept = "" if session.conversation.system is None else "; the system prompt stays"
    session.screen.say(f"a new conversation{kept}")


def _undo(session: ChatSession, argument: str) -> None:
    said = " ".join(session.undo().split())
    session.screen.say(f"took back: {said if len(said) <= _SHOWN else said[:_SHOWN] + '...'}")


def _retry(session: ChatSession, argument: str) -> None:
    session.retry()


def _save(session: ChatSession, argument: str) -> None:
    path = saved_path(argument)
    if session.conversation.turns == 0:
        raise UserError("there is nothing to save yet")
    if path not in (session.kept, session.asked) and path.is_file() and is_saved_conversation(path):
        session.asked = path
        raise UserError(f"{path} holds another conversation; repeat the command to overwrite it")
    save(path, session.conversation, sampling=session.sampling, model=session.model.name)
    session.kept, session.asked = path, None
    session.screen.say(f"saved to {path}")


def _load(session: ChatSession, argument: str) -> None:
    path = saved_path(argument)
    session.resume(load(path), path=path)


def _help(session: ChatSession, argument: str) -> None:
    commands = [(f"{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()]
    keys = [
        ("Alt-Enter", "begin a new line; so does a backslash at the end"),
        ("Ctrl-C", "stop the answer, or clear the line"),
        ("Ctrl-D", "leave"),
        ("//", "begins a message with a slash"),
    ]
    session.screen.table([*commands, *keys])


def _leave(session: ChatSession, argument: str) -> None:
    session.leaving = True


COMMANDS: dict[str, Command] = {
    "/image": Command(
        argument="PATH|URL", help="attach images to the next message", run=attach_images, takes_path=True
    ),
    "/images": Command(argument="", help="show what is attached", run=_list_attached),
    "/clear_images": Command(argument="", help="attach nothing", run=_detach),
    "/video": Command(argument="PATH", help="attach a video to the next message", run=_attach_videos, takes_path=True),
    "/system": Command(argument="[TEXT]", help="show or change the system prompt", run=_system),
    "/set": Command(argument="[NAME VALUE]", help=f"show the settings or change one: {', '.join(NAMES)}", run=_set),
    "/retry": Command(argument="", help="ask for the last answer again", run=_retry),
    "/undo": Command(argument="", help="take the last turn back", run=_undo),
    "/reset": Command(argument="", help="begin a new conversation", run=_reset),
    "/clear": Command(argument="", help="the same as /reset", run=_reset),
    "/save": Command(argument="FILE", help="write the conversation to a file", run=_save, takes_path=True),
    "/load": Command(argument="FILE", help="continue a conversation from a file", run=_load, takes_path=True),
    "/help": Command(argument="", help="show this", run=_help),
    "/exit": Command(argument="", help="leave; so do exit and quit by themselves", run=_leave),
}


CONTINUED = "\\"


def continues(line: str) -> bool:
    """Return whether a line continues in the next one: it ends with a backslash that is not one of a pair."""
    return (len(line) - len(line.rstrip(CONTINUED))) % 2 == 1


def piped_lines() -> Iterator[str]:
    """Yield the lines of stdin; a line that ends with a backslash is joined with the next."""
    assert isinstance(sys.stdin, io.TextIOWrapper), "Python opens stdin as one"
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
    """Yield what the user enters at the prompt until Ctrl-D; Ctrl-C clears the line."""
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
    """Yield lines in a terminal that cannot move its cursor (TERM=dumb)."""
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
    """Completes commands, files after commands that take one, and names of settings."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yield the completions at the cursor."""
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
    """Return a file that no other user may read, created if necessary; raises OSError if it cannot be written."""
    file = path.expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    with file.open("ab"):
        return file
