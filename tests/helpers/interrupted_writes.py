"""An action that is cut off right before its k-th operation on files."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

from lmm_r1.cli import main

OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "open")


class Interruption(BaseException):
    """What no handler of the code under test may catch."""


class Interrupter:
    """Counts this process's operations on files, and stops one of them before it takes place.

    It lies in the interpreter's audit hook, which cannot be removed: one for each process.
    """

    def __init__(self) -> None:
        self.left: int | None = None
        self.stop: Callable[[], None] = self._raise
        sys.addaudithook(self._note)

    def run(self, action: Callable[[], object], *, at: int) -> bool:
        """Run an action up to its operation `at`, counted from 0; says whether it was cut off there."""
        self.left = at
        try:
            action()
        except Interruption:
            return True
        finally:
            self.left = None
        return False

    def _note(self, event: str, arguments: tuple) -> None:
        if self.left is None or event not in OPERATIONS or (event == "open" and not _writes(arguments)):
            return
        if self.left == 0:
            self.left = None
            self.stop()
        else:
            self.left -= 1

    @staticmethod
    def _raise() -> None:
        raise Interruption


def killed_at(interrupter: Interrupter, action: Callable[[], object], *, at: int) -> bool:
    """Run an action in a child process that ends, without a word, right before its operation `at`."""
    child = os.fork()
    if child == 0:
        interrupter.stop = lambda: os._exit(9)
        try:
            interrupter.run(action, at=at)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), "the action itself failed"
    return code == 9


def _writes(arguments: tuple) -> bool:
    path, mode, flags = arguments
    if mode is None:
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return any(letter in mode for letter in "wxa+")


# `python -m helpers.interrupted_writes BYTES COMMAND ...` runs a command where no file can grow beyond so many bytes.
# A full disk does the same: a write ends early, or fails. It needs no mount, and holds for what libraries write, too.
if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), hard))
    main(sys.argv[2:])
