"""Calls that may hang: each ends at its deadline for whoever waits, and what does not end is left behind."""

from __future__ import annotations

import asyncio
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
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Outcome] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not answer.done():
            set_outcome(outcome)

    def run() -> None:
        settled: tuple[Callable[[Any], None], object]
        try:
            settled = (answer.set_result, function())
        except BaseException as error:  # whatever a user's code raises, SystemExit included
            settled = (answer.set_exception, passable(error))
        # The loop is closed where nobody waits any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, *settled)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return answer, thread


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
