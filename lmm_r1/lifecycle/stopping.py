"""How a run ends before its time: Ctrl-C and SIGTERM are held up until the weights are those of a whole step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lmm_r1.config.shared import CheckpointConfig
from lmm_r1.errors import RunStopped, UserError
from lmm_r1.files.atomic import write_atomically
from lmm_r1.files.full_disk import sentence_of
from lmm_r1.records.run_folder import ERROR_FILE

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_ONE_REQUEST_S = 2.0


class StopRequests:
    """Takes Ctrl-C and SIGTERM while it is entered.

    The first one raises KeyboardInterrupt; inside `held` it only says so, and whoever holds it up asks `asked` or
    calls `check` afterwards. Another one raises at once, unless it comes with the first: a terminal and a launcher may
    both send theirs.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._asked_at = 0.0
        self._holding = False
        self._before: dict[signal.Signals, Any] = {}
        self.progress: Callable[[], Progress | None] = lambda: None
        """Says how far the run has come; None while nothing has been trained. Set by what trains."""

    def __enter__(self) -> StopRequests:
        self.listen()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def listen(self) -> None:
        """Take the signals (again: Ray takes SIGTERM for itself when it starts); elsewhere than in a main thread, none."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NAMES:
            handler = signal.getsignal(number)
            # A shell lets what it runs in the background ignore Ctrl-C, and sends it SIGTERM then.
            if handler != signal.SIG_IGN:
                self._before.setdefault(number, handler)
                signal.signal(number, self._take)

    @property
    def asked(self) -> bool:
        """Whether the run is to end."""
        return self._signal is not None

    @property
    def reason(self) -> str:
        """What ended the run, in words."""
        return _NAMES[signal.SIGINT if self._signal is None else self._signal]

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended."""
        return 128 + (signal.SIGINT if self._signal is None else self._signal)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold a first request up: what stands inside ends as a whole, or not at all."""
        outer, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = outer

    def check(self) -> None:
        """Raise KeyboardInterrupt where a request was held up."""
        if self.asked:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        first = not self.asked
        if first:
            self._signal, self._asked_at = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._asked_at < _ONE_REQUEST_S:
            return
        if self._holding and first:
            # Written past Python's buffers, in the middle of whose writing a signal may come.
            os.write(sys.stderr.fileno(), f"{self.reason}: after this step; once more ends it at once\n".encode())
            return
        raise KeyboardInterrupt


@dataclass(kw_only=True)
class SaveSchedule:
    """When a step is saved: every so many steps, and when so many minutes have passed since the last one."""

    steps: int
    """0 or less: never by steps."""
    minutes: float
    """0: never by time."""
    saved_at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, ckpt: CheckpointConfig) -> SaveSchedule:
        """Return the schedule of `--ckpt.save_steps` and `--ckpt.save_minutes`."""
        return cls(steps=ckpt.save_steps, minutes=ckpt.save_minutes)

    def is_due(self, step: int) -> bool:
        """Say whether a finished step is to be saved."""
        by_time = self.minutes > 0 and time.monotonic() - self.saved_at >= 60 * self.minutes
        return by_time or (self.steps > 0 and step % self.steps == 0)

    def note_saved(self) -> None:
        """Count the minutes from now on."""
        self.saved_at = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come, and what of it is on disk."""

    name: str
    """The stage."""
    step: int
    total: int
    saved: int | None
    """Step of the newest checkpoint; None where there is none."""
    checkpoints: Path
    disabled: bool
    """Whether the run writes no checkpoints."""
    overwrite: bool
    """Whether repeating the command as it is would delete them."""

    def describe(self) -> str:
        """Return where the run stopped, what is saved and how to go on."""
        stopped = f"{self.name} stopped at step {self.step}/{self.total}"
        again = "the same command" + (" without --ckpt.overwrite" if self.overwrite else "")
        if self.disabled:
            return f"{stopped}; nothing is saved (--ckpt.disable_ds), {again} starts anew"
        if self.saved is None:
            return f"{stopped}; nothing is saved yet, {again} starts anew"
        return f"{stopped}; step {self.saved} is saved in {self.checkpoints}, {again} goes on from there"


@contextlib.contextmanager
def told_ends(stops: StopRequests, *, folder: Path) -> Iterator[None]:
    """Turn whatever ends a run inside into sentences: where it stopped, what is saved, how to go on.

    A failure that is not the user's leaves its traceback in `error.txt` of the run folder.

    Raises:
        RunStopped: after Ctrl-C or SIGTERM.
        UserError: after a failure.
    """
    try:
        yield
    except KeyboardInterrupt:
        reached = stops.progress()
        where = "stopped before it started to train" if reached is None else reached.describe()
        raise RunStopped(f"{stops.reason}: {where}", exit_code=stops.exit_code) from None
    except Exception as error:
        reached = stops.progress()
        where = "" if reached is None else f". {reached.describe()}"
        # What a worker raised comes as the cause of Ray's own error.
        cause = getattr(error, "cause", None) or error
        if isinstance(error, UserError):
            raise UserError(f"{cause}{where}") from error
        if sentence := sentence_of(error):
            raise UserError(f"{sentence}{where}") from error
        lines = [line for line in str(cause).splitlines() if line.strip()] or [""]
        raise UserError(f"{type(cause).__name__}: {lines[0]} ({_kept(error, folder=folder)}){where}") from error


def _kept(error: Exception, *, folder: Path) -> str:
    """Write the traceback into the run folder, or to stderr where that is what fails, and say where it is."""
    text = "".join(traceback.format_exception(error))
    try:
        write_atomically(folder / ERROR_FILE, text=text)
    except UserError:
        sys.stderr.write(text)
        return "the whole traceback is above"
    return f"the whole traceback is in {folder / ERROR_FILE}"
