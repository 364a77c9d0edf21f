"""Calls that may hang: callers stop waiting at the deadline; calls that hang are abandoned."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


class DeadlinePassed(Exception):
    """Some work did not finish in time."""


def start_thread(function: Callable[[], Outcome], *, name: str) -> tuple[asyncio.Future[Outcome], threading.Thread]:
    """Run a function in its own thread and return a future of its result, and the thread.

    A process can end while such a thread runs; threads of a pool would block its exit.
    """
    answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    thread = threading.Thread(target=_run_for, args=(answer, function), name=name, daemon=True)
    thread.start()
    return answer, thread


class OwnThread:
    """Runs functions one after the other in one thread, for libraries that require that.

    The thread starts with the first function, and ends with `end` or with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], Outcome]) -> asyncio.Future[Outcome]:
        """Return a future of the function's result; functions run in order."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.put(lambda: _run_for(answer, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return answer

    def end(self) -> None:
        """End the thread after its last function, without waiting for it."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            task()


def _run_for(answer: asyncio.Future[Outcome], function: Callable[[], Outcome]) -> None:
    """Run a function in this thread, for a future of another thread's event loop."""
    settled: tuple[Callable[[Any], None], object]
    try:
        settled = (answer.set_result, function())
    except BaseException as error:  # the user's own code may raise anything, including SystemExit
        settled = (answer.set_exception, passable(error))
    # The loop may be closed when nobody waits any more.
    with suppress(RuntimeError):
        answer.get_loop().call_soon_threadsafe(_settle, answer, *settled)


def _settle(answer: asyncio.Future[Any], set_outcome: Callable[[Any], None], outcome: object) -> None:
    if not answer.done():
        set_outcome(outcome)


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
