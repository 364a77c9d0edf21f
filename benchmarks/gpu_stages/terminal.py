"""Commands as a user types them in a folder, each in a process group of its own and within the stage's time."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from machine import ROOT

# Every process that a command starts inherits it, also Ray's, which leave the process group.
MARK = "GPU_SMOKE_COMMAND"
# Of the output of a command that failed.
TAIL_CHARACTERS = 450


class CommandFailed(Exception):
    """A command ended with another code than it should, or not in time; the message holds the end of its output."""


class Terminal:
    """Runs commands in one folder until a deadline; `typed` and `printed` are the commands and their lines of output.

    Args:
        place: A folder that is made anew, with the logs of the commands; they run in its subfolder `folder`.
    """

    def __init__(self, place: Path, *, limit_s: float) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        self.folder = place / "project"
        self.typed: list[str] = []
        self.printed: list[int] = []
        self._place = place
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def run(self, line: str, *, until: Callable[[], bool] = lambda: False, code: int | None = 0) -> None:
        """Run a command until it ends, or kill it with all of its processes as soon as `until` is true.

        Args:
            code: With which it must end; None if it must not end by itself.

        Raises:
            CommandFailed: It ends otherwise, or not in time.
        """
        with self._started(line) as process:
            if not self._wait(process, line, until):
                self._check_code(process, line, code)

    @contextmanager
    def serving(self, line: str, *, code: int = 128 + signal.SIGTERM) -> Iterator[str]:
        """Start a server on a free port and yield its address; it must end as it should after SIGTERM."""
        port = self._place / f"port_{len(self.typed)}"
        line = f"{line} --port 0 --port-file {port}"
        with self._started(line) as process:
            if not self._wait(process, line, lambda: port.exists() and port.read_text().strip() != ""):
                self._check_code(process, line, None)
            yield f"http://127.0.0.1:{port.read_text().strip()}"
            process.send_signal(signal.SIGTERM)
            self._wait(process, line, lambda: False)
            # By default as a shell reports the signal.
            self._check_code(process, line, code)

    def ask(self, address: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a JSON request."""
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(address, data=json.dumps(request).encode(), headers=headers)
        with urllib.request.urlopen(asked, timeout=max(1.0, self._deadline - time.monotonic())) as reply:
            return json.load(reply)

    @contextmanager
    def _started(self, line: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command; all of its processes are gone at the end, however that comes."""
        mark = uuid.uuid4().hex
        log = self._log = self._place / f"command_{len(self.typed)}.log"
        self.typed.append(line.partition(" --port 0")[0].replace(f"{ROOT}/", ""))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHON": sys.executable, MARK: mark}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                words_of(line),
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            _end_all(process, mark)
            self.printed.append(log.read_bytes().count(b"\n"))

    def _wait(self, process: subprocess.Popen[bytes], line: str, until: Callable[[], bool]) -> bool:
        """Wait until a command has ended or something is true; return whether it is."""
        while process.poll() is None:
            if until():
                return True
            if time.monotonic() > self._deadline:
                raise self._failure(line, f"was not done within the stage's {self._limit_s:.0f} s")
            time.sleep(0.1)
        return False

    def _check_code(self, process: subprocess.Popen[bytes], line: str, code: int | None) -> None:
        if process.returncode != code:
            raise self._failure(line, f"ended with code {process.returncode}")

    def _failure(self, line: str, how: str) -> CommandFailed:
        end = " | ".join(self._log.read_text(errors="replace").splitlines())[-TAIL_CHARACTERS:]
        return CommandFailed(f"`{line}` {how}: {end}")


def words_of(line: str) -> list[str]:
    """Return a command line's words, with this Python's `lmm-r1`, or its module if no command is installed."""
    words = shlex.split(line)
    if words[0] != "lmm-r1":
        return words
    installed = Path(sys.executable).with_name("lmm-r1")
    return [*([str(installed)] if installed.exists() else [sys.executable, "-m", "lmm_r1.cli"]), *words[1:]]


def _end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill a command's group, and whatever else inherited its mark, until nothing of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while left := _marked(mark):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    """Return the processes whose environment holds the mark; one that has ended has no environment."""
    found = []
    for entry in Path("/proc").iterdir():
        # It may end meanwhile, or be another user's.
        with suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
