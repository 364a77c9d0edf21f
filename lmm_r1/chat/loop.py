"""A whole chat: loads the model, handles lines until there are no more, and closes the engine."""

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
from lmm_r1.chat.conversation import NAMES, ChatSampling, SavedConversation, load
from lmm_r1.chat.screen import PlainScreen, Screen, Streams, captured_output
from lmm_r1.chat.session import ChatSession, dragged_image, greeting
from lmm_r1.config.generation import ChatConfig, check_chat
from lmm_r1.errors import UserError


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
    """Handle every line until the user leaves, and return whether all of them succeeded.

    Raises KeyboardInterrupt after an answer was stopped, if `ends_when_stopped`.
    """
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
    """Return the file of the history, None if there is none or it cannot be written."""
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
    with _no_echo(), screen.loading(f"loading {title}"):
        model = load_model(config)
    session = ChatSession(model, screen, sampling=sampling, system=config.system, interruption=_interruption)
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
