"""A whole chat: loads the model, reads lines, and answers each message or runs its command until there are no more."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import is_dumb_terminal

from lmm_r1.chat.chat_model import load_model
from lmm_r1.chat.conversation import (
    NAMES,
    ChatSampling,
    SavedConversation,
    changed,
    is_saved_conversation,
    load,
    save,
    saved_path,
)
from lmm_r1.chat.screen import PlainScreen, Screen, Streams, captured_output
from lmm_r1.chat.session import ChatSession, dragged_image, greeting, read_image, read_video, sources_of
from lmm_r1.config.generation import ChatConfig, check_chat
from lmm_r1.config.shared import text_given
from lmm_r1.data.messages import NO_PROMPT
from lmm_r1.data.reading import shipped_prompt
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from lmm_r1.records.run_folder import trained_reading

SIGN = "/"
WORDS = {"exit": "/exit", "quit": "/exit"}
"""Lines that are commands without a slash, as in other programs."""
_NO_TEXT = ('""', "''")
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Command:
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
    session.check_more(images=1)
    sources = sources_of(argument)
    session.check_more(images=len(sources))
    images = [read_image(source, max_pixels=session.max_pixels) for source in sources]
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


def run_chat(config: ChatConfig) -> bool:
    """Run the chat and return whether all lines succeeded; raises UserError for invalid settings.

    Raises KeyboardInterrupt if Ctrl-C should end the program: while it loads, and always outside of a terminal.
    """
    check_chat(config)
    sampling = _sampling(config)
    saved = None if config.load is None else load(config.load)
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with captured_output() as streams:
        screen = _terminal_screen(streams) if in_terminal else PlainScreen(streams)
        history = _history(config, screen) if in_terminal else None
        session = _session(config, screen, sampling=sampling)
        with contextlib.closing(session.model.engine):
            if saved is not None:
                _resume(session, saved, config=config)
            if not in_terminal:
                return converse(session, piped_lines(), ends_when_stopped=True)
            lines = prompted_lines(streams.out, history=history, before=lambda: prompt(session))
            converse(session, lines, ends_when_stopped=False)
            return True


def converse(session: ChatSession, lines: Iterable[str], *, ends_when_stopped: bool) -> bool:
    """Handle every line until the user leaves, and return whether all of them succeeded."""
    all_well = True
    for line in lines:
        try:
            respond(session, line)
        except UserError as error:
            session.screen.fail(str(error))
            all_well = False
        except KeyboardInterrupt:  # in a command, such as a download; an answer is stopped in another way
            session.screen.fail("stopped")
            session.stopped = True
        if session.stopped and ends_when_stopped:
            raise KeyboardInterrupt
        if session.leaving:
            break
    return all_well


def respond(session: ChatSession, line: str) -> None:
    """Handle one line: a command, an image that was dropped on the terminal, or a message."""
    text = line.strip()
    if not text:
        return
    if text in WORDS:
        run_command(session, WORDS[text])
    elif text.split()[0] in COMMANDS:
        run_command(session, text)
    elif dragged_image(text) is not None:
        attach_images(session, text)
    elif text.startswith(SIGN * 2):
        session.say(text[len(SIGN) :])
    elif text.startswith(SIGN):
        run_command(session, text)
    else:
        session.say(text)


def prompt(session: ChatSession) -> str:
    """Return the prompt with the number of attachments: `[2 attached] > `."""
    return f"[{len(session.attached)} attached] > " if session.attached else "> "


def _resume(session: ChatSession, saved: SavedConversation, *, config: ChatConfig) -> None:
    """Continue the conversation of --load; other flags override its settings."""
    assert config.load is not None, "the conversation was loaded from it"
    session.resume(saved, path=config.load)
    defaults = {field.name: field.default for field in fields(ChatConfig)}
    flags = {name: getattr(config, name) for name in NAMES if getattr(config, name) != defaults[name]}
    session.sampling = replace(session.sampling, **flags)
    if config.system is not None:
        session.conversation.set_system(config.system)


def _history(config: ChatConfig, screen: Screen) -> Path | None:
    if config.history is None:
        return None
    try:
        return private_file(config.history)
    except OSError as error:
        screen.say(f"no history is kept: --history {config.history} cannot be written ({error.strerror})")
        return None


def _session(config: ChatConfig, screen: Screen, *, sampling: ChatSampling) -> ChatSession:
    began = time.perf_counter()
    title = " + ".join(os.path.basename(os.path.abspath(path)) for path in (config.model, config.adapter) if path)
    system = config.system if config.load else first_prompt(config, screen)
    with _no_echo(), screen.loading(f"loading {title}"):
        model = load_model(config)
    session = ChatSession(model, screen, sampling=sampling, system=system, interruption=_interruption)
    _, session.max_pixels = trained_reading(_models(config))
    screen.say(f"{title} by {config.backend}, loaded in {time.perf_counter() - began:.0f} s; /help for commands")
    if model.episodes is not None:
        screen.say(greeting(model.episodes.environment.name))
    return session


def _models(config: ChatConfig) -> list[str]:
    return [config.model, str(config.adapter or config.model)]


def first_prompt(config: ChatConfig, screen: Screen) -> str | None:
    """Return the system prompt of a new conversation, and say it if it is that of the run which trained the model."""
    if config.system is not None:
        return config.system
    prompt, _ = trained_reading(_models(config))
    if prompt in (None, NO_PROMPT):
        return None
    text = shipped_prompt(prompt) or text_given(prompt, flag="the run's --data.system_prompt") or ""
    screen.say(f"system prompt of the run: {' '.join(text.split())} (/system replaces it)")
    return text


@contextlib.contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    with _no_echo(), _ctrl_c() as should_stop:
        yield should_stop


def _terminal_screen(streams: Streams) -> Screen:
    from lmm_r1.chat.screen import TerminalScreen

    return TerminalScreen(streams)


def _sampling(config: ChatConfig) -> ChatSampling:
    try:
        return ChatSampling(temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens)
    except UserError as error:
        raise UserError(f"--{error}") from error


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; raises nothing, to not end an engine's step halfway."""
    pressed = False

    def press(signal_number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _no_echo() -> Iterator[None]:
    """Show nothing that is typed, including "^C"; it is read at the next prompt."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    local_modes = 3
    before = termios.tcgetattr(sys.stdin)
    silent = list(before)
    silent[local_modes] = before[local_modes] & ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
