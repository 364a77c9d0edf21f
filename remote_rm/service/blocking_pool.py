"""The judge of a verifier for callers without an event loop: it runs on one in a thread of its own."""

import asyncio
import sys
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from remote_rm.service.judge import ServiceLimits
from remote_rm.service.pool import judge_of
from remote_rm.verifier import Item, Score, Verifier

T = TypeVar("T")

UNLIMITED_QUEUE = ServiceLimits(max_queued_items=sys.maxsize)
"""Callers wait for their own items, however many: nobody else is to be told to come back later."""


class BlockingPool:
    """Scores items from `start` to `stop`; several threads may call `judge` at a time.

    Without a `stop`, its workers end with this process.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        workers: int,
        item_timeout_seconds: float,
        limits: ServiceLimits = UNLIMITED_QUEUE,
    ) -> None:
        self._pool = judge_of(verifier, workers=workers, item_timeout_seconds=item_timeout_seconds, limits=limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._pool.worker_pids

    def start(self) -> None:
        """Start the workers; raises RuntimeError where one does not come up, NotReady where nobody can be asked."""
        assert self._loop is None, "a pool is started once at a time"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"judge {self._pool.name}", daemon=True)
        self._thread.start()
        try:
            self._run(self._pool.start())
        except BaseException:
            self._close()
            raise

    def stop(self) -> None:
        """End the workers, whatever they are at."""
        try:
            self._run(self._pool.stop())
        finally:
            self._close()

    def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; raises PoolUnavailable as the pool does."""
        return self._run(self._pool.judge(items))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "a pool judges between start() and stop()"
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _close(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None
