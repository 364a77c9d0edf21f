"""How a run ends early: Ctrl-C and SIGTERM are deferred until the weights are those of a whole step."""

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

from lmm_r1.config import PPOConfig, SupervisedConfig, checkpoint_folder
from lmm_r1.config.shared import CheckpointConfig
from lmm_r1.errors import RunStopped, UserError
from lmm_r1.files.atomic import in_worker, sentence_of, write_atomically
from lmm_r1.records.run_folder import ERROR_FILE
from remote_rm.redaction import hidden_text

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_ONE_REQUEST_S = 2.0


class StopRequests:
    """Handles Ctrl-C and SIGTERM during its block.

    The first one raises KeyboardInterrupt. Inside `held` it only prints a line, and the caller reads `asked` or calls
    `check` afterwards. A second one raises at once, unless it comes together with the first: a terminal and a launcher
    may both send one.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._asked_at = 0.0
        self._holding = False
        self._before: dict[signal.Signals, Any] = {}
        self.progress: Callable[[], Progress | None] = lambda: None
        """Returns how far the run has come; None before training. The training loop sets it."""

    def __enter__(self) -> StopRequests:
        self.listen()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def listen(self) -> None:
        """Install the signal handlers, again after Ray has installed its own; do nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NAMES:
            handler = signal.getsignal(number)
            # Background jobs of a shell ignore Ctrl-C; the shell sends them SIGTERM.
            if handler != signal.SIG_IGN:
                self._before.setdefault(number, handler)
                signal.signal(number, self._take)

    @property
    def asked(self) -> bool:
        """Whether a stop was requested."""
        return self._signal is not None

    @property
    def reason(self) -> str:
        """The name of the signal that ended the run."""
        return _NAMES[signal.SIGINT if self._signal is None else self._signal]

    @property
    def exit_code(self) -> int:
        """The exit code that a shell expects of a process that a signal ended."""
        return 128 + (signal.SIGINT if self._signal is None else self._signal)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defer a first request until the end of the block."""
        outer, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = outer

    def check(self) -> None:
        """Raise KeyboardInterrupt if a request was deferred."""
        if self.asked:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        first = not self.asked
        if first:
            self._signal, self._asked_at = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._asked_at < _ONE_REQUEST_S:
            return
        if self._holding and first:
            # Write without Python's buffers: the signal may interrupt a write to them.
            os.write(sys.stderr.fileno(), f"{self.reason}: after this step; once more ends it at once\n".encode())
            return
        raise KeyboardInterrupt


@dataclass(kw_only=True)
class SaveSchedule:
    """When a step is saved: every `steps` steps, and when `minutes` have passed since the last save."""

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
        """Say whether a finished step must be saved."""
        by_time = self.minutes > 0 and time.monotonic() - self.saved_at >= 60 * self.minutes
        return by_time or (self.steps > 0 and step % self.steps == 0)

    def note_saved(self) -> None:
        """Start counting the minutes again."""
        self.saved_at = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come, and which step is saved."""

    name: str
    """The stage."""
    step: int
    total: int
    saved: int | None
    """Step of the newest checkpoint; None if there is none."""
    checkpoints: Path
    disabled: bool
    """Whether the run writes no checkpoints."""
    overwrite: bool
    """Whether repeating the same command would delete the checkpoints."""

    @classmethod
    def of(cls, config: PPOConfig | SupervisedConfig, *, step: int, total: int, saved: int) -> Progress:
        """Return the progress of a run; `saved` is 0 if nothing is saved."""
        ckpt = config.ckpt
        return cls(
            name=config.logger.stage_name,
            step=step,
            total=total,
            saved=saved or None,
            checkpoints=checkpoint_folder(config),
            disabled=ckpt.disable_ds,
            overwrite=ckpt.overwrite,
        )

    def describe(self) -> str:
        """Return where the run stopped, what is saved and how to resume."""
        stopped = f"{self.name} stopped at step {self.step}/{self.total}"
        again = "the same command" + (" without --ckpt.overwrite" if self.overwrite else "")
        if self.disabled:
            return f"{stopped}; nothing is saved (--ckpt.disable_ds), {again} starts anew"
        if self.saved is None:
            return f"{stopped}; nothing is saved yet, {again} starts anew"
        return f"{stopped}; step {self.saved} is saved in {self.checkpoints}, {again} goes on from there"


@contextlib.contextmanager
def reported_ends(stops: StopRequests, *, folder: Path) -> Iterator[None]:
    """Turn whatever ends a run in the block into sentences: where it stopped, what is saved, how to resume.

    The traceback of a failure that is not the user's is written to `error.txt` of the run folder.

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
        cause = in_worker(error)
        if isinstance(error, UserError):
            raise UserError(f"{cause}{where}") from error
        if sentence := sentence_of(error):
            raise UserError(f"{sentence}{where}") from error
        lines = [line for line in str(cause).splitlines() if line.strip()] or [""]
        raise UserError(f"{type(cause).__name__}: {lines[0]} ({_kept(error, folder=folder)}){where}") from error


def _kept(error: Exception, *, folder: Path) -> str:
    """Write the traceback to the run folder, or to stderr if that fails, and return where it is."""
    text = hidden_text("".join(traceback.format_exception(error)))
    try:
        write_atomically(folder / ERROR_FILE, text=text)
    except UserError:
        sys.stderr.write(text)
        return "the whole traceback is above"
    return f"the whole traceback is in {folder / ERROR_FILE}"
