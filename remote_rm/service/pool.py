"""Judges items in worker processes, each item with a hard limit of processor time; one bad item never fails its batch."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import shutil
import signal
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from remote_rm.service import worker
from remote_rm.verifier import (
    WORKER_MEMORY_BYTES,
    AskingVerifier,
    Item,
    JudgeCounts,
    PoolUnavailable,
    Score,
    Verifier,
    quick_score,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

QUICK_CHARS = 50_000
"""A longer response is judged by a worker, which has a time limit."""
INLINE_CHARS = 20_000
"""Up to so much text is judged quickly in the event loop; more of it in a thread, since requests must not wait for it."""
WALL_FACTOR = 10
"""A worker that has not ended after so many times its limit of processor time is ended, too: it waits for something."""
START_SECONDS = 300.0
LOOK_SECONDS = 1.0
"""How often it is looked whether the pool of an item has broken."""
ATTEMPTS = 10
"""How many workers an item may lose to a signal from outside before it is taken for the cause (out of memory)."""
ITEMS_PER_WORKER = 1000
"""Then a worker is replaced, since what it freed may not return to the system."""
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What people and the system end a process with; no expression does."""
UNKNOWN_EXIT_CODE = 255
"""The exit code that multiprocessing reports if it cannot be had."""


LONGEST_FOLDER = 60
"""The longest temporary folder in which a socket's path fits into 108 bytes, with the names that multiprocessing adds."""


def _shorten_sockets() -> None:
    """Put multiprocessing's sockets below /tmp if TMPDIR is too long for them; Python does so itself from 3.14 on."""
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    if len(tempfile.gettempdir()) > LONGEST_FOLDER and "tempdir" not in config:
        config["tempdir"] = folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        multiprocessing.util.Finalize(None, shutil.rmtree, args=[folder, True], exitpriority=-100)


def _end(pools: list[ProcessPool]) -> None:
    ended = pools.copy()
    pools.clear()
    for pool in ended:
        pool.stop()
    for pool in ended:
        pool.join()


class VerifierPool:
    """Scores items by a verifier: in this process if that is quick, else in a pool of worker processes.

    Belongs to the event loop that `start` ran in. Requests take turns at the workers.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        workers: int,
        item_timeout_seconds: float,
        worker_memory_bytes: int = WORKER_MEMORY_BYTES,
    ) -> None:
        if workers < 1 or item_timeout_seconds <= 0:
            raise ValueError(
                f"workers must be at least 1 and item_timeout_seconds above 0, got {workers} and {item_timeout_seconds}"
            )
        self.counts = JudgeCounts()
        self.waiting = 0
        self._verifier = verifier
        self._workers = workers
        self._item_timeout_seconds = item_timeout_seconds
        self._worker_memory_bytes = worker_memory_bytes
        # Of one worker each: what a killed one leaves locked stops no other.
        self._pools: list[ProcessPool] = []
        self._idle: asyncio.Queue[ProcessPool] = asyncio.Queue()
        self._replies: set[ProcessFuture[tuple[str | None, str]]] = set()
        # A child of multiprocessing waits for its own children when it exits.
        multiprocessing.util.Finalize(self, _end, args=(self._pools,), exitpriority=10)

    @property
    def name(self) -> str:
        return self._verifier.name

    async def start(self) -> None:
        """Start the workers and wait until they are ready; raises a RuntimeError if one does not come up."""
        self._idle = asyncio.Queue()
        try:
            pools = [self._new_pool() for _ in range(self._workers)]
            ready = [await asyncio.to_thread(pool.schedule, worker.is_ready) for pool in pools]
            await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, ready)), timeout=START_SECONDS)
        except (OSError, RuntimeError, asyncio.TimeoutError) as error:
            await self.stop()
            raise RuntimeError(f"the worker processes did not come up: {error!r}") from error

    def _new_pool(self) -> ProcessPool:
        _shorten_sockets()
        # Never by forking this process, which runs threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(worker.PRELOADED_MODULES))
        pool = ProcessPool(
            max_workers=1,
            max_tasks=ITEMS_PER_WORKER,
            initializer=worker.prepare,
            initargs=(self._verifier, self._worker_memory_bytes),
            context=context,
        )
        self._pools.append(pool)
        self._idle.put_nowait(pool)
        return pool

    async def stop(self) -> None:
        """End the workers, whatever they are at; `judge` raises PoolUnavailable for items in progress."""
        await asyncio.to_thread(_end, self._pools)
        for reply in list(self._replies):
            reply.cancel()

    async def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; cancelled, it frees the places and workers of its items.

        No item makes it raise: PoolUnavailable says that no worker can be started.
        """
        if sum(len(item.response) + len(item.label) for item in items) <= INLINE_CHARS:
            quick = self._quick_scores(items)
        else:
            quick = await asyncio.to_thread(self._quick_scores, items)
        slow = [item for item, score in zip(items, quick, strict=True) if score is None]
        self.counts.items += len(items)
        self.counts.quick += len(items) - len(slow)
        judged = iter(await self._judge_by_workers(slow) if slow else ())
        return [next(judged) if score is None else score for score in quick]

    def _quick_scores(self, items: Sequence[Item]) -> list[Score | None]:
        return [None if len(item.response) > QUICK_CHARS else quick_score(self._verifier, item) for item in items]

    async def _judge_by_workers(self, items: Sequence[Item]) -> list[Score]:
        # Of a request, only as many items as there are workers wait for one: a large request lets others take turns.
        turns = asyncio.Semaphore(self._workers)

        async def in_turn(item: Item) -> Score:
            async with turns:
                return await self._judge_by_worker(item)

        self.waiting += len(items)
        try:
            outcomes = await asyncio.gather(*map(in_turn, items), return_exceptions=True)
        finally:
            self.waiting -= len(items)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Score)]

    async def _judge_by_worker(self, item: Item) -> Score:
        for _ in range(ATTEMPTS):
            if not self._pools:
                raise PoolUnavailable("the pool is not running")
            pool = await self._idle.get()
            is_well = True
            try:
                score, reason = await self._reply(pool, item)
                if score is None:
                    return self._failed(item, reason)
                self.counts.worker += 1
                return Score(**json.loads(score))
            except asyncio.TimeoutError:
                return self._timed_out(item)
            except asyncio.CancelledError:
                if self._pools:
                    raise
            except (ProcessExpired, RuntimeError) as death:
                code = death.exitcode if isinstance(death, ProcessExpired) else -signal.SIGKILL
                if code == -signal.SIGPROF:
                    return self._timed_out(item)
                if -code not in OUTSIDE_SIGNALS and code != UNKNOWN_EXIT_CODE:
                    return self._failed(item, f"its worker crashed with exit code {code}")
                is_well = False
                self.counts.lost_workers += 1
                logger.warning("a worker was killed from outside; its item is judged again: %r", death)
            finally:
                if is_well:
                    self._idle.put_nowait(pool)
            if pool in self._pools:
                self._pools.remove(pool)
                pool.stop()
                await asyncio.to_thread(pool.join)
                self._new_pool()
        return self._failed(item, "every worker that judged it was killed")

    async def _reply(self, pool: ProcessPool, item: Item) -> tuple[str | None, str]:
        """Return what a worker says; raises RuntimeError if it was killed while it was idle."""
        seconds = WALL_FACTOR * self._item_timeout_seconds
        reply = pool.schedule(worker.verdict, args=(item, self._item_timeout_seconds), timeout=seconds)
        self._replies.add(reply)
        reply.add_done_callback(self._replies.discard)
        answer = asyncio.wrap_future(reply)
        try:
            while not answer.done():
                await asyncio.wait((answer,), timeout=LOOK_SECONDS)
                if not answer.done() and not pool.active:
                    raise RuntimeError("the pool broke before it took the item")
            return answer.result()
        finally:
            answer.cancel()

    def _timed_out(self, item: Item) -> Score:
        self.counts.timed_out += 1
        logger.warning("no verdict within %g s of processor time: %s", self._item_timeout_seconds, item.excerpt)
        return replace(self._verifier.failed_score(item), timed_out=True)

    def _failed(self, item: Item, reason: str) -> Score:
        self.counts.failed += 1
        logger.warning("the verifier failed with %s: %s", reason, item.excerpt)
        return self._verifier.failed_score(item)


def judge_of(
    verifier: Verifier, *, workers: int, item_timeout_seconds: float, worker_memory_bytes: int = WORKER_MEMORY_BYTES
) -> VerifierPool:
    """Return the judge of a verifier: a pool, which for one that asks others is of the verifier's own type."""
    judge_type = verifier.judge_type() if isinstance(verifier, AskingVerifier) else VerifierPool
    return judge_type(
        verifier, workers=workers, item_timeout_seconds=item_timeout_seconds, worker_memory_bytes=worker_memory_bytes
    )


class BlockingPool:
    """Scores items from `start` to `stop`; several threads may call `judge` at a time.

    Without a `stop`, its workers end with this process.
    """

    def __init__(self, verifier: Verifier, *, workers: int, item_timeout_seconds: float) -> None:
        self._pool = judge_of(verifier, workers=workers, item_timeout_seconds=item_timeout_seconds)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the workers; raises RuntimeError if none comes up, NotReady if nobody can be asked."""
        assert self._loop is None, "a pool is started once at a time"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"judge {self._pool.name}", daemon=True)
        self._thread.start()
        try:
            self._run(self._pool.start())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the workers, whatever they are at."""
        self._run(self._pool.stop())
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; raises PoolUnavailable as the pool does."""
        return self._run(self._pool.judge(items))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "a pool judges between start() and stop()"
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
