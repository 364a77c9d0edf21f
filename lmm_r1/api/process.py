"""A command's work inside of a process that goes on behind it: a notebook, or a script that calls several."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lmm_r1 import cpu
from lmm_r1.cluster.worker_processes import close_server
from lmm_r1.config.rewards import GIVEN
from lmm_r1.errors import RunStopped, UserError

_FLAG = re.compile(r"--(?=[A-Za-z])")


@contextmanager
def own_process(arguments: Mapping[str, str]) -> Iterator[None]:
    """Do inside what a command does in a process of its own, and put back what it changes for what comes after it.

    That is the environment, Ray, the processes' group, and Python's garbage collector. Errors speak of settings and
    arguments, and not of flags.

    Args:
        arguments: what the call's arguments are called, by the names of the settings in whose place they stand.

    Raises:
        UserError: the process cannot do it, or what is raised inside. RunStopped likewise.
    """
    _check_process()
    environment, thresholds = dict(os.environ), gc.get_threshold()
    try:
        with _without_loop():
            yield
    except UserError as error:
        # One that was raised in a worker comes with its traceback, as the cause of Ray's own.
        raise UserError(in_arguments(str(getattr(error, "cause", error)), arguments)) from error
    except RunStopped as stop:
        raise RunStopped(in_arguments(str(stop), arguments), exit_code=stop.exit_code) from stop
    finally:
        _leave()
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def _without_loop() -> Iterator[None]:
    """Let code inside run event loops of its own, where one runs in this thread, as behind each cell of a notebook.

    That one waits for the cell either way. asyncio has these functions for whoever writes a loop.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)


def in_arguments(sentence: str, arguments: Mapping[str, str]) -> str:
    """Return a sentence about flags as one about settings and arguments: `--train.seed` is `train.seed`."""
    sentence = " ".join(line.strip() for line in sentence.splitlines()).replace(GIVEN, "")
    for setting, argument in arguments.items():
        sentence = re.sub(rf"--{re.escape(setting)}(?![\w.])", argument, sentence)
    return _FLAG.sub("", sentence).replace("the same command", "the same call")


def _check_process() -> None:
    # What `multiprocessing` asks, too, before it starts a process.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "a process that was started to help imports this script again, and would do all of it once more; put the "
            'calls of lmm_r1 under `if __name__ == "__main__":`'
        )
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise UserError(
            "this process has joined a Ray cluster; call ray.shutdown() first: a call of lmm_r1 starts its own"
        )


def _leave() -> None:
    """End what a command leaves to the end of its process, as far as it was begun."""
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()
    # It holds what workers load, some 700 MB.
    close_server()
    if "lmm_r1.host.strategy" in sys.modules:
        from lmm_r1.host.strategy import leave_group

        leave_group()
    cpu.follow_workers(None)
