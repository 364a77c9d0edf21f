"""Calls that may hang: each ends at its deadline for whoever waits, and what does not end is left behind."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


class DeadlinePassed(Exception):
    """Nothing has come of some work in the time that it had."""


def start_thread(function: Callable[[], Outcome], *, name: str) -> tuple[asyncio.Future[Outcome], threading.Thread]:
    """Run a function in a thread of its own and return its outcome to come, and the thread.

    A process can end while such a thread runs, which the threads of a pool would not let it.
    """
    answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    thread = threading.Thread(target=_run_for, args=(answer, function), name=name, daemon=True)
    thread.start()
    return answer, thread


class OwnThread:
    """Runs functions one after the other, all in one thread, for libraries that ask for that.

    The thread starts with the first of them, and ends with `end`, or with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], Outcome]) -> asyncio.Future[Outcome]:
        """Return what will come of a function; those that were given before go first."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.put(lambda: _run_for(answer, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return answer

    def end(self) -> None:
        """Let the thread end when it has nothing left to do; it is not waited for."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            task()


def _run_for(answer: asyncio.Future[Outcome], function: Callable[[], Outcome]) -> None:
    """Run a function in this thread, for a future of another thread's event loop."""
    settled: tuple[Callable[[Any], None], object]
    try:
        settled = (answer.set_result, function())
    except BaseException as error:  # whatever a user's code raises, SystemExit included
        settled = (answer.set_exception, passable(error))
    # The loop is closed where nobody waits any more.
    with suppress(RuntimeError):
        answer.get_loop().call_soon_threadsafe(_settle, answer, *settled)


def _settle(answer: asyncio.Future[Any], set_outcome: Callable[[Any], None], outcome: object) -> None:
    if not answer.done():
        set_outcome(outcome)


def passable(error: BaseException) -> Exception:
    """Return an error that an event loop can carry: neither the end of the process nor that of an iteration."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


async def within(deadline_s: float, work: Awaitable[Outcome]) -> Outcome:
    """Return what comes of some work.

    Raises:
        DeadlinePassed: nothing has come of it within the deadline. It is cancelled, and not waited for: a task that
            goes on in spite of that stays behind.
        RuntimeError: it has cancelled itself.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(_look_at)
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    finally:
        task.cancel()
    if not done:
        raise DeadlinePassed
    if task.cancelled():
        raise RuntimeError("it was cancelled")
    return task.result()


def _look_at(task: asyncio.Future[Outcome]) -> None:
    """Look at the error of a task that nobody waits for any more, of which asyncio would complain."""
    if not task.cancelled():
        task.exception()
