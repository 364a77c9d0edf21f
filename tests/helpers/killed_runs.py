"""Commands that are killed, with every process they have started, at a chosen moment, and then repeated as they were."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from helpers.stopping.moments import MOMENT, FileMoment

ROOT = Path(__file__).resolve().parents[2]
# What lies there is imported by every interpreter that starts, also by those of Ray's workers.
STOPPING = Path(__file__).parent / "stopping"
# Inherited by whatever a command starts, also by Ray's processes, which leave its session and outlive it.
MARK = "LMM_R1_TEST_RUN"

Moment = FileMoment | Callable[[], bool]
"""Asked again and again while a command runs; once it says yes, everything is killed.

At a moment that shows in files the process that reaches it stops by itself, so that it cannot be missed.
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    killed: bool
    code: int
    output: str
    """What it and its processes printed, on both streams."""


@dataclass(frozen=True, kw_only=True)
class KillableCommand:
    """A command that is repeated in one folder."""

    argv: Sequence[str]
    cwd: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *, kill: Moment | None = None, limit_s: float = 600) -> Ended:
        """Run to the end, or until the moment of the kill; fails where neither comes in time."""
        mark = uuid.uuid4().hex
        path = os.pathsep.join(map(str, (ROOT, STOPPING)))
        environment = {**os.environ, "PYTHONPATH": path, **self.environment, MARK: mark}
        if isinstance(kill, FileMoment):
            environment[MOMENT] = kill.to_json()
        log = self.cwd / f"run-{mark}.log"
        deadline = time.monotonic() + limit_s
        with log.open("w") as stream:
            process = subprocess.Popen(
                list(self.argv),
                cwd=self.cwd,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            killed = False
            try:
                while process.poll() is None and not killed:
                    assert time.monotonic() < deadline, f"neither ended nor killed in time:\n{log.read_text()[-3000:]}"
                    killed = kill is not None and kill()
                    time.sleep(0 if killed else 0.1 if kill is None else 0.02)
            finally:
                # In the one that ended by itself, too, nothing may be left that writes.
                _kill_all(process, mark)
        return Ended(killed=killed, code=process.wait(), output=log.read_text())

    def run_here(self) -> Ended:
        """Run to the end in this process, where the libraries are loaded."""
        # It loads them, for which whoever only starts processes need not wait.
        from helpers.commands_here import run_here

        _, _, module, *arguments = self.argv
        ended = run_here(module.rpartition(".")[2], arguments, folder=self.cwd)
        return Ended(killed=False, code=ended.code, output=ended.stdout + ended.stderr)


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def appears(folder: Path, pattern: str) -> FileMoment:
    """When something of this name comes into the folder; what was there before does not count."""
    there = tuple(os.listdir(folder)) if folder.is_dir() else ()
    return FileMoment(folder=str(folder), pattern=pattern, before=there)


def lines_in(file: Path, count: int) -> FileMoment:
    """When the file has so many lines."""
    return FileMoment(folder=str(file.parent), pattern=file.name, lines=count)


def kills(title: str, mark: str, *, when: Moment) -> Moment:
    """Kills, once and when it is time, the process whose title begins so and whose environment holds the mark.

    Says whether it has.
    """
    killed: list[int] = []

    def asked() -> bool:
        if not killed and when():
            for process in psutil.process_iter():
                try:
                    if (
                        process.cmdline()[:1]
                        and process.cmdline()[0].startswith(title)
                        and mark in process.environ().values()
                    ):
                        process.kill()
                        killed.append(process.pid)
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
        return bool(killed)

    return asked


def _kill_all(process: subprocess.Popen, mark: str) -> None:
    """Kill everything that carries the mark, the command first, until nothing is left."""
    process.kill()
    deadline = time.monotonic() + 30
    while living := _marked(mark):
        assert time.monotonic() < deadline, f"these cannot be killed: {living}"
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                # It ended by itself in the meantime.
                continue
        time.sleep(0.01)
    process.wait()


def _marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            # It has ended, or is none of ours.
            continue
    return found
