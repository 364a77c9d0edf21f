"""Processes of tests.

A Python that has loaded the training stack starts what is no test of its own start: each process of it is a fork. A fork
ends with the process that was started in its place. No list of processes has its command line and environment: what is
looked up by them needs `sys.executable`.

The garbage collector of a test process does not look again at what stays: the collected tests and the libraries. That
took a fifth of the unit tests' time. An engine of vLLM freezes what it holds and thaws all that is frozen when it ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import runpy
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze


def keep_frozen() -> None:
    """Freeze what there is, and let nothing but `thaw` end that; what is made from now on is collected as always."""
    gc.collect()
    _FREEZE()
    gc.freeze = gc.unfreeze = _leave


def thaw() -> None:
    """Undo `keep_frozen`, for libraries that count their objects at the end of the process."""
    gc.freeze, gc.unfreeze = _FREEZE, _UNFREEZE
    gc.unfreeze()


def _leave() -> None:
    """Neither freeze nor thaw."""


CLIENT = "LMM_R1_TEST_CLIENT"


@functools.cache
def forking_python() -> str:
    """Return the command that Ray starts workers with instead of Python: each is a fork of a warm process."""
    from helpers import fork_server

    from lmm_r1.cluster import run_environment

    folder = tempfile.TemporaryDirectory(prefix="lmm_r1_forks_")
    atexit.register(folder.cleanup)
    return fork_server.start(Path(folder.name), run_environment())


@functools.cache
def warm_python() -> str:
    """The path of an executable that takes what Python does; commands, helpers and files of code are forks."""
    python = forking_python()
    executable = Path(shlex.split(python)[-1]).with_name("python")
    fork = f"export {CLIENT}=$$; exec {python} {shlex.quote(__file__)}"
    executable.write_text(
        '#!/bin/sh\ncase "$1 $2" in\n'
        f'"-m lmm_r1."* | "-m helpers."* | *.py" "*) {fork} "$@" ;;\n'
        f'*) exec {shlex.quote(sys.executable)} "$@" ;;\nesac\n'
    )
    executable.chmod(0o755)
    return str(executable)


def kill(process: subprocess.Popen) -> None:
    """Kill a process of a session of its own, whose standard output is a pipe, and wait until its fork ended, too."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    # The fork learns of it a moment later, and may hold locks until then; the pipe is open for as long.
    process.communicate()


def _end_with(process: int) -> None:
    """Kill this process and what it has started once another one has ended."""
    descriptor = os.pidfd_open(process)

    def wait() -> None:
        select.select([descriptor], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _main() -> None:
    _end_with(int(os.environ.pop(CLIENT)))
    # What Python does with its environment and arguments before it runs anything.
    sys.path[:1] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        # PyTorch asks for it when it is loaded.
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
