"""Calls that may hang: callers stop waiting at the deadline; calls that hang are abandoned."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


class DeadlinePassed(Exception):
    """Some work did not finish in time."""


def start_thread(function: Callable[[], Outcome], *, name: str) -> tuple[asyncio.Future[Outcome], threading.Thread]:
    """Run a function in its own thread and return a future of its result, and the thread.

    A process can end while such a thread runs; threads of a pool would block its exit.
    """
    answer: Future[Outcome] = Future()
    thread = threading.Thread(target=_run_for, args=(answer, function), name=name, daemon=True)
    thread.start()
    return asyncio.wrap_future(answer), thread


class OwnThread:
    """Runs functions one after the other in one thread, for libraries that require that.

    The thread starts with the first function, and ends with `end` or with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], Outcome]) -> asyncio.Future[Outcome]:
        """Return a future of the function's result; functions run in order."""
        answer: Future[Outcome] = Future()
        self._waiting.put((answer, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return asyncio.wrap_future(answer)

    def end(self) -> None:
        """End the thread after its last function, without waiting for it."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            _run_for(*task)


def _run_for(answer: Future[Outcome], function: Callable[[], Outcome]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(function())
    except BaseException as error:  # whatever a user's code raises, SystemExit included
        answer.set_exception(passable(error))


def passable(error: BaseException) -> Exception:
    """Return an error that an event loop can carry: neither SystemExit nor StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


async def within(deadline_s: float, work: Awaitable[Outcome]) -> Outcome:
    """Return the result of some work.

    Raises:
        DeadlinePassed: it did not finish within the deadline. It is cancelled, but a task that ignores this is abandoned.
        RuntimeError: it has cancelled itself.
    """
    task = asyncio.ensure_future(work)
    # Otherwise asyncio reports the error of an abandoned task.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    finally:
        task.cancel()
    if not done:
        raise DeadlinePassed
    if task.cancelled():
        raise RuntimeError("it was cancelled")
    return task.result()
