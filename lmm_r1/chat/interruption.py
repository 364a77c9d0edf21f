"""Ctrl-C while an answer is written, and a terminal that shows nothing of what is typed meanwhile."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
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
def no_echo() -> Iterator[None]:
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
