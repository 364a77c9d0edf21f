"""Judges items in worker processes, each item with a hard limit of wall time; one bad item never fails its batch."""

import asyncio
import logging
import multiprocessing
import resource
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from pebble import CONSTS, ProcessFuture, ProcessPool

from remote_rm.verifier import Item, Score, Verifier

logger = logging.getLogger(__name__)

WORKER_MEMORY_BYTES = 4 * 2**30
"""Address space of one worker: an expression such as 9^9^9^9 fails with a MemoryError instead of filling the machine."""
START_TIMEOUT_SECONDS = 60.0
BROKEN_POOL_CHECK_SECONDS = 1.0
PRELOADED_MODULES = ("sympy", "math_verify", "remote_rm.accuracy")
"""Imported once, in the process that workers are forked from, so that a killed worker is replaced in milliseconds."""


@dataclass(kw_only=True)
class PoolCounts:
    """What has been judged since the pool was started."""

    items: int = 0
    quick: int = 0
    """Decided in the server process."""
    timed_out: int = 0
    failed: int = 0
    """Items whose verifier raised, or whose worker died."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The score of one item, and whether it was cut off."""

    score: Score
    timed_out: bool = False


class VerifierPool:
    """Scores items by a verifier: in this process where that is quick, else in a pool of worker processes."""

    def __init__(self, verifier: Verifier, *, workers: int, item_timeout_seconds: float) -> None:
        if workers < 1 or item_timeout_seconds <= 0:
            raise ValueError(
                f"workers must be at least 1 and item_timeout_seconds above 0, got {workers} and {item_timeout_seconds}"
            )
        self.counts = PoolCounts()
        self._verifier = verifier
        self._workers = workers
        self._item_timeout_seconds = item_timeout_seconds
        self._processes: ProcessPool | None = None

    async def start(self) -> None:
        """Start the workers and wait until one of them answers; raises a RuntimeError if none does."""
        self._processes = self._new_processes()
        ready = asyncio.wrap_future(self._processes.schedule(_nothing))
        try:
            await asyncio.wait_for(ready, START_TIMEOUT_SECONDS)
        except (asyncio.TimeoutError, BrokenProcessPool) as error:
            await self.stop()
            raise RuntimeError(f"no worker process came up within {START_TIMEOUT_SECONDS:.0f} s: {error}") from error

    async def stop(self) -> None:
        """End the workers; items still being judged are dropped."""
        processes, self._processes = self._processes, None
        if processes is not None:
            await asyncio.to_thread(_stop_processes, processes)

    async def judge(self, items: Sequence[Item]) -> list[Judgement]:
        """Return one judgement per item, in their order; raises no exception on account of an item."""
        quick = await asyncio.to_thread(lambda: [self._quick_score(item) for item in items])
        self.counts.items += len(items)
        self.counts.quick += sum(score is not None for score in quick)
        return await asyncio.gather(
            *(self._judge_one(item, quick_score=score) for item, score in zip(items, quick, strict=True))
        )

    def _quick_score(self, item: Item) -> Score | None:
        try:
            return self._verifier.quick_score(item)
        except Exception:
            # The text comes from a model: whatever a rule makes of it, the worker has another go at it.
            logger.exception("quick_score raised for %s", _excerpt(item))
            return None

    async def _judge_one(self, item: Item, *, quick_score: Score | None) -> Judgement:
        if quick_score is not None:
            return Judgement(score=quick_score)
        try:
            return Judgement(score=await self._score_in_worker(item))
        except (FutureTimeoutError, asyncio.TimeoutError):
            self.counts.timed_out += 1
            logger.warning("no verdict within %g s: %s", self._item_timeout_seconds, _excerpt(item))
            return Judgement(score=self._verifier.failed_score(item), timed_out=True)
        except Exception as error:
            # The text comes from a model: an answer that breaks the verifier, or kills its worker, is a wrong answer.
            self.counts.failed += 1
            logger.warning("the verifier failed with %r: %s", error, _excerpt(item))
            return Judgement(score=self._verifier.failed_score(item))

    async def _score_in_worker(self, item: Item) -> Score:
        try:
            return await self._scheduled(item)
        except BrokenProcessPool:
            # A worker killed from outside while it was idle breaks the whole pool: once more, in a new one.
            return await self._scheduled(item)

    async def _scheduled(self, item: Item) -> Score:
        if self._processes is None:
            raise RuntimeError("the pool is not running; call start() first")
        if not self._processes.active:
            logger.warning("the worker pool broke; starting a new one")
            broken, self._processes = self._processes, self._new_processes()
            await asyncio.to_thread(_stop_processes, broken)
        future = self._processes.schedule(self._verifier.score, args=(item,), timeout=self._item_timeout_seconds)
        return await _result(future, processes=self._processes)

    def _new_processes(self) -> ProcessPool:
        # A worker stuck in a long big-integer operation does not hear SIGTERM, and the pool stands still while it waits.
        CONSTS.term_timeout = 0.1
        return ProcessPool(max_workers=self._workers, initializer=_limit_memory, context=_start_context())


def _start_context() -> multiprocessing.context.BaseContext:
    """How workers are started: never by forking this process, which runs threads."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED_MODULES))
    return context


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))


def _nothing() -> None:
    """The first task of a new pool."""


def _stop_processes(processes: ProcessPool) -> None:
    processes.stop()
    processes.join()


async def _result(future: ProcessFuture, *, processes: ProcessPool) -> Score:
    """Wait for a future; a task still queued when its pool breaks would otherwise be waited for without end."""
    waiting = asyncio.wrap_future(future)
    while not waiting.done():
        await asyncio.wait({waiting}, timeout=BROKEN_POOL_CHECK_SECONDS)
        if not waiting.done() and not processes.active:
            waiting.cancel()
            raise BrokenProcessPool("the worker pool broke while the item was queued")
    return waiting.result()


def _excerpt(item: Item) -> str:
    return f"label {item.label[:100]!r}, response ending in {item.response[-200:]!r}"
