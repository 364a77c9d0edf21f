"""An event loop in a thread of its own for code of a user that may block: what blocks there holds up no engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from lmm_r1.agents.deadlines import passable

Outcome = TypeVar("Outcome")


class AgentLoop:
    """Runs coroutines one beside the other, all in one thread, which ends with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Return what comes of a coroutine, from whatever loop this is awaited in; cancelling this cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_kept(work), self._loop))


async def _kept(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:  # in a task, either would end the loop for all others
        raise passable(error) from error
