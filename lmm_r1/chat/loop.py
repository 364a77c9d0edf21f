"""A whole chat: the model is loaded, lines are taken until there are no more, and the engine is closed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType

from lmm_r1.chat.chat_model import load_model
from lmm_r1.chat.commands import (
    COMMANDS,
    SIGN,
    WORDS,
    attach_images,
    piped_lines,
    private_file,
    prompted_lines,
    run_command,
)
from lmm_r1.chat.conversation import NAMES, Sampling, SavedConversation, load
from lmm_r1.chat.screen import PlainScreen, Screen, Streams, captured_output
from lmm_r1.chat.session import Session, dragged_image, greeting
from lmm_r1.config.generation import ChatConfig, check_chat
from lmm_r1.errors import UserError


def run_chat(config: ChatConfig) -> bool:
    """Have the chat and say whether all lines did; raises UserError for what the user gave to begin with.

    Raises KeyboardInterrupt where Ctrl-C is to end the program: while it loads, and always outside of a terminal.
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
                _take_up(session, saved, config=config)
            if not in_terminal:
                return converse(session, piped_lines(), ends_when_stopped=True)
            lines = prompted_lines(streams.out, history=history, before=lambda: prompt(session))
            converse(session, lines, ends_when_stopped=False)
            return True


def converse(session: Session, lines: Iterable[str], *, ends_when_stopped: bool) -> bool:
    """Act on every line until the user leaves, and say whether all of them did.

    Raises KeyboardInterrupt after an answer was stopped, where that is to end it.
    """
    all_well = True
    for line in lines:
        try:
            respond(session, line)
        except UserError as error:
            session.screen.fail(str(error))
            all_well = False
        except KeyboardInterrupt:  # in a command, a download for one: an answer is stopped in another way
            session.screen.fail("stopped")
            session.stopped = True
        if session.stopped and ends_when_stopped:
            raise KeyboardInterrupt
        if session.leaving:
            break
    return all_well


def respond(session: Session, line: str) -> None:
    """Do what one line says: a command, an image that was dropped on the terminal, or a message."""
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


def prompt(session: Session) -> str:
    """Return the prompt, which shows how much is attached: `[2 attached] > `."""
    return f"[{len(session.attached)} attached] > " if session.attached else "> "


def _take_up(session: Session, saved: SavedConversation, *, config: ChatConfig) -> None:
    """Go on with the conversation of --load, with what the other flags say where they say anything."""
    assert config.load is not None, "what is saved comes from there"
    session.take_up(saved, path=config.load)
    defaults = {field.name: field.default for field in fields(ChatConfig)}
    flags = {name: getattr(config, name) for name in NAMES if getattr(config, name) != defaults[name]}
    session.sampling = replace(session.sampling, **flags)
    if config.system is not None:
        session.conversation.set_system(config.system)


def _history(config: ChatConfig, screen: Screen) -> Path | None:
    """Return the file of the history, None where there is to be none or none can be kept."""
    if config.history is None:
        return None
    try:
        return private_file(config.history)
    except OSError as error:
        screen.say(f"no history is kept: --history {config.history} cannot be written ({error.strerror})")
        return None


def _session(config: ChatConfig, screen: Screen, *, sampling: Sampling) -> Session:
    began = time.perf_counter()
    title = " + ".join(os.path.basename(os.path.abspath(path)) for path in (config.model, config.adapter) if path)
    with _no_echo(), screen.loading(f"loading {title}"):
        model = load_model(config)
    session = Session(model, screen, sampling=sampling, system=config.system, interruption=_interruption)
    screen.say(f"{title} by {config.backend}, loaded in {time.perf_counter() - began:.0f} s; /help for commands")
    if model.episodes is not None:
        screen.say(greeting(model.episodes.environment.name))
    return session


@contextlib.contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    with _no_echo(), _ctrl_c() as should_stop:
        yield should_stop


def _terminal_screen(streams: Streams) -> Screen:
    from lmm_r1.chat.screen import TerminalScreen

    return TerminalScreen(streams)


def _sampling(config: ChatConfig) -> Sampling:
    try:
        return Sampling(temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens)
    except UserError as error:
        raise UserError(f"--{error}") from error


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed; it raises nothing, as an engine's step must not end halfway."""
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
    """Let a terminal show nothing that is typed, "^C" among it; what is typed is read at the next prompt."""
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
