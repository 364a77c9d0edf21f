"""Moments of a run that show in its files, at which the process that reaches one stops.

A killer that only looks from outside may miss what is there for some milliseconds. Imported at the start of every
interpreter, so it takes nothing but the standard library.
"""

import fnmatch
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass

MOMENT = "LMM_R1_TEST_MOMENT"
# Between two of these nothing changes that a moment looks for.
OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.scandir", "os.listdir"}


@dataclass(frozen=True, kw_only=True)
class FileMoment:
    """When a folder holds a new name by a pattern, and a file of this name at least so many lines."""

    folder: str
    pattern: str
    before: tuple[str, ...] = ()
    lines: int = 0

    def __call__(self) -> bool:
        try:
            names = fnmatch.filter(os.listdir(self.folder), self.pattern)
        except FileNotFoundError:
            return False
        new = [name for name in names if name not in self.before]
        return any(not self.lines or _lines(os.path.join(self.folder, name)) >= self.lines for name in new)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "FileMoment":
        read = json.loads(text)
        return cls(**read | {"before": tuple(read["before"])})


def stop_at(moment: FileMoment) -> None:
    """Stop this process, all of its threads, at its first operation on files from the moment on."""
    looking = False

    def note(event: str, arguments: tuple) -> None:
        nonlocal looking
        if event not in OPERATIONS or looking:
            return
        looking = True
        try:
            if moment():
                os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            looking = False

    sys.addaudithook(note)


def _lines(path: str) -> int:
    with open(path, "rb") as stream:
        return stream.read().count(b"\n")
