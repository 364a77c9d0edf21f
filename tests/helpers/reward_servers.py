"""Reward servers as processes of their own, and what their requests look like."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from remote_rm.verifier import Verifier

ROOT = Path(__file__).resolve().parents[2]
UNRULY_VERIFIER = '''
import os
import signal
import sys
import time
from dataclasses import dataclass

from remote_rm.verifier import Score


@dataclass(frozen=True)
class UnrulyVerifier:
    """Does what the response says, in a worker."""

    name: str = "unruly"

    def check_label(self, label):
        if not label:
            raise ValueError("the gold answer is empty")

    def quick_score(self, item):
        return Score(reward=7.0, score=1.0, parts={"accuracy": 1.0}) if item.response == "quick" else None

    def score(self, item):
        word, _, number = item.response.partition(" ")
        if word == "sleep":
            time.sleep(float(number))
        if word == "burn":
            while True:
                pass
        if word == "raise":
            raise RecursionError("too deep")
        if word == "nonsense":
            return Score(reward=object(), score=1.0, parts={})
        if word == "die":
            os._exit(3)
        if word == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "allocate":
            bytearray(int(float(number) * 2**20))
        return Score(reward=float(number or word), score=1.0, parts={"accuracy": 1.0})

    def failed_score(self, item):
        if item.label == "cannot fail":
            raise ZeroDivisionError("a fault of the verifier")
        return Score(reward=0.0, score=0.0, parts={"accuracy": 0.0})
'''
SERVE_UNRULY = """
import sys
sys.path.insert(0, {folder!r})
from unruly_verifier import UnrulyVerifier
from remote_rm.service.app import serve
from remote_rm.registry import add_serving_arguments
import argparse
parser = argparse.ArgumentParser()
add_serving_arguments(parser)
if __name__ == "__main__":
    serve(UnrulyVerifier(), parser.parse_args())
"""


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that has said where it listens."""

    endpoint: str
    process: subprocess.Popen

    @property
    def address(self) -> str:
        """The address without the path of rewards."""
        return self.endpoint.removesuffix("/get_reward")

    def workers(self) -> list[psutil.Process]:
        """The worker processes, which are children of the fork server."""
        return [worker for child in psutil.Process(self.process.pid).children() for worker in child.children()]

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.kill()
        self.process.wait()


def health_of(server: RunningServer) -> dict[str, Any]:
    """What it says of itself."""
    with urllib.request.urlopen(f"{server.address}/health", timeout=10) as reply:
        return json.load(reply)


def math_command(*flags: str) -> list[str]:
    """The command of the math verifier."""
    return [sys.executable, "-m", "remote_rm.math_verifier", "--port", "0", *flags]


def unruly_command(folder: Path, *flags: str) -> list[str]:
    """The command of a server whose verifier does what the response says; its files are written to the folder."""
    (folder / "unruly_verifier.py").write_text(UNRULY_VERIFIER)
    script = folder / "serve_unruly.py"
    script.write_text(SERVE_UNRULY.format(folder=str(folder)))
    return [sys.executable, str(script), "--port", "0", *flags]


def import_unruly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    """The verifier that does what the response says, in a module that worker processes can import too."""
    (folder / "unruly_verifier.py").write_text(UNRULY_VERIFIER)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "unruly_verifier", raising=False)
    return import_module("unruly_verifier").UnrulyVerifier()


def everything(env: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a server: this one, in which modules are found, and more."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}


@contextlib.contextmanager
def running(command: list[str], *, env: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """Start a server, wait until it listens, and end it afterwards."""
    with subprocess.Popen(
        command, cwd=ROOT, env=everything(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        # Nobody reads the log, and a full pipe would stop the server.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            line = process.stdout.readline()
            assert line.startswith("reward server: http://127.0.0.1:"), line
            yield RunningServer(endpoint=line.removeprefix("reward server: ").strip(), process=process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
