"""Judges items in worker processes, each item with a hard limit of processor time; one bad item never fails its batch."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from remote_rm.service.worker import Starved, VerifierFailed, WorkerLimits, WorkerLost, WorkerProcess, start_context
from remote_rm.verifier import (
    DEFAULT_LIMITS,
    STOPPING,
    AskingVerifier,
    Item,
    JudgeCounts,
    PooledJudge,
    PoolUnavailable,
    Score,
    ServiceLimits,
    Verifier,
    check_room,
    quick_score,
)

T = TypeVar("T")

FIRST_SERVED = 3
"""So many items in a row may be the first of their requests; then one of a request that has begun has its turn."""


class Line(Generic[T]):
    """The items of one request that wait."""

    def __init__(self, items: Iterable[T]) -> None:
        self.items = deque(items)


class FairQueue(Generic[T]):
    """Gives out items of requests by turns, and the first one of a new request soonest.

    So a request of one item waits for one item, and not for the large ones that came before it.
    """

    def __init__(self) -> None:
        self._again: deque[T] = deque()
        self._new: deque[Line[T]] = deque()
        self._begun: deque[Line[T]] = deque()
        self._length = 0
        self._firsts = 0

    def __len__(self) -> int:
        return self._length

    def add(self, items: Iterable[T]) -> Line[T]:
        """Queue the items of one request, at least one."""
        line = Line(items)
        assert line.items, "a line without items would never be taken up"
        self._new.append(line)
        self._length += len(line.items)
        return line

    def put_back(self, item: T) -> None:
        """Queue an item that was given out: it is the next."""
        self._again.append(item)
        self._length += 1

    def pop(self) -> T:
        """Return the next item; raises IndexError if none is waiting."""
        self._length -= bool(self._length)
        if self._again:
            return self._again.popleft()
        is_first = bool(self._new) and (not self._begun or self._firsts < FIRST_SERVED)
        self._firsts = self._firsts + 1 if is_first else 0
        line = (self._new if is_first else self._begun).popleft()
        item = line.items.popleft()
        if line.items:
            self._begun.append(line)
        return item

    def drop(self, line: Line[T]) -> None:
        """Take the rest of a request out."""
        if not line.items:
            return
        (self._new if line in self._new else self._begun).remove(line)
        self._length -= len(line.items)
        line.items.clear()

    def clear(self) -> Iterator[T]:
        """Take everything out, and yield it."""
        while self:
            yield self.pop()


logger = logging.getLogger(__name__)

STALLED_SECONDS = 0.2
"""After this time an item no longer delays later ones: another worker replaces its worker."""
STALLED_PER_WORKER = 4
"""How many such items may run in addition to each regular worker."""
QUICK_CHARS = 50_000
"""A longer response is judged by a worker, which has a time limit."""
INLINE_CHARS = 20_000
"""Up to so much text is judged quickly at once; more of it in slices, between which other requests have their turn."""
SLICE_SECONDS = 0.005
MAX_LOST_WORKERS = 10
"""How many workers one item may lose to a SIGKILL before it is taken for the cause (the system was out of memory)."""
MAX_FAILED_STARTS = 20
MAX_STARVED = 3
"""How often an item may get no processor time before it counts as timed out."""


@dataclass(kw_only=True, eq=False)
class _Job:
    item: Item
    score: asyncio.Future[Score]
    lost_workers: int = 0
    failed_starts: int = 0
    starved: int = 0
    is_stalled: bool = False
    judging: asyncio.Task[None] | None = None
    """The task that waits for a worker's verdict on it."""


class VerifierPool:
    """Scores items by a verifier: in this process if that is quick, else in a pool of worker processes.

    Belongs to the event loop that `start` ran in.
    """

    def __init__(
        self, verifier: Verifier, *, workers: int, item_timeout_seconds: float, limits: ServiceLimits = DEFAULT_LIMITS
    ) -> None:
        if workers < 1 or item_timeout_seconds <= 0:
            raise ValueError(
                f"workers must be at least 1 and item_timeout_seconds above 0, got {workers} and {item_timeout_seconds}"
            )
        self.counts = JudgeCounts()
        self._verifier = verifier
        self._workers = workers
        self._item_timeout_seconds = item_timeout_seconds
        self._max_queued_items = limits.max_queued_items
        self._worker_limits = WorkerLimits(item_seconds=item_timeout_seconds, memory_bytes=limits.worker_memory_bytes)
        self._is_running = False
        self._is_refusing = False
        self._starting: asyncio.Future[None] | None = None
        self._slice_turn = asyncio.Lock()
        self._waiting: FairQueue[_Job] = FairQueue()
        self._idle: list[WorkerProcess] = []
        self._alive: set[WorkerProcess] = set()
        self._killed: list[WorkerProcess] = []
        self._tasks: dict[asyncio.Task[None], _Job | None] = {}
        self._busy = 0
        self._stalled = 0
        self._mean_seconds = 0.0

    @property
    def name(self) -> str:
        return self._verifier.name

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> int:
        return self._busy + self._stalled

    @property
    def workers(self) -> int:
        return len(self._alive)

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._alive]

    async def start(self) -> None:
        """Start the workers and wait until all of them are ready; raises a RuntimeError if one does not come up.

        Meanwhile `judge` decides what it can quickly, and waits with the rest.
        """
        self._starting, self._is_refusing = asyncio.get_running_loop().create_future(), False
        try:
            await self._start_workers()
        finally:
            self._starting.set_result(None)

    async def _start_workers(self) -> None:
        starting = [self._new_worker() for _ in range(self._workers)]
        started = await asyncio.gather(*starting, return_exceptions=True)
        self._idle = [worker for worker in started if isinstance(worker, WorkerProcess)]
        self._is_running = True
        errors = [error for error in started if isinstance(error, BaseException)]
        if errors:
            await self.stop()
            raise RuntimeError(f"the worker processes did not come up: {errors[0]}") from errors[0]

    def refuse(self) -> None:
        """Refuse new items from now on; `judge` raises PoolUnavailable, also for the items in progress."""
        self._is_refusing = True
        self._drop_jobs(STOPPING)

    def _drop_jobs(self, reason: str) -> None:
        for job in [*(job for job in self._tasks.values() if job is not None), *self._waiting.clear()]:
            if not job.score.done():
                job.score.set_exception(PoolUnavailable(reason, retry_after_seconds=1))

    async def stop(self) -> None:
        """End the workers; items still waiting or being judged are dropped, and `judge` raises PoolUnavailable."""
        self._is_running = False
        workers = list(self._alive)
        self._drop_jobs("the pool was stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.ended() for worker in [*workers, *self._killed]))
        self._idle.clear()
        self._alive.clear()
        self._killed.clear()

    async def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; cancelled, it frees the places and workers of its items.

        No item makes it raise: PoolUnavailable says that too many items wait, or that no worker can be started.
        """
        quick = await self._quick_scores(items)
        slow = [item for item, score in zip(items, quick, strict=True) if score is None]
        if slow and self._starting is not None:
            await asyncio.shield(self._starting)
        if self._is_refusing:
            raise PoolUnavailable(STOPPING, retry_after_seconds=1)
        if slow:
            self._check_room(len(slow))
        self.counts.items += len(items)
        self.counts.quick += len(items) - len(slow)
        judged = iter(await self._judge_by_workers(slow) if slow else ())
        return [next(judged) if score is None else score for score in quick]

    async def _quick_scores(self, items: Sequence[Item]) -> list[Score | None]:
        if sum(len(item.response) + len(item.label) for item in items) <= INLINE_CHARS:
            return [self._quick_score(item) for item in items]
        scores: list[Score | None] = []
        while len(scores) < len(items):
            # The lock is given in the order in which it was asked for: of all large requests, each has its turn.
            async with self._slice_turn:
                until = time.perf_counter() + SLICE_SECONDS
                while len(scores) < len(items) and time.perf_counter() < until:
                    scores.append(self._quick_score(items[len(scores)]))
                await asyncio.sleep(0)
        return scores

    def _quick_score(self, item: Item) -> Score | None:
        return None if len(item.response) > QUICK_CHARS else quick_score(self._verifier, item)

    def _check_room(self, more: int) -> None:
        if not self._is_running:
            raise RuntimeError("the pool is not running; call start() first")
        check_room(
            waiting=self.waiting,
            more=more,
            max_queued_items=self._max_queued_items,
            retry_after_seconds=self.waiting * self._mean_seconds / self._workers,
        )

    async def _judge_by_workers(self, items: Sequence[Item]) -> list[Score]:
        loop = asyncio.get_running_loop()
        jobs = [_Job(item=item, score=loop.create_future()) for item in items]
        line = self._waiting.add(jobs)
        self._dispatch()
        try:
            return await asyncio.gather(*(job.score for job in jobs))
        except BaseException:
            # The client has disconnected, or one of its items cannot be judged: the other scores are not needed.
            self._waiting.drop(line)
            for job in jobs:
                job.score.cancel()
                if job.judging is not None:
                    job.judging.cancel()
            raise

    def _dispatch(self) -> None:
        while self._is_running and self._waiting and self._busy < self._workers:
            self._busy += 1
            task = asyncio.get_running_loop().create_task(self._run())
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _run(self) -> None:
        """Have waiting jobs judged, one after the other, until there are none or one of them stalls.

        One task does many: under load, every pass through the event loop costs more time than a judgement.
        """
        task, job = asyncio.current_task(), None
        assert task is not None
        try:
            while self._is_running and self._waiting and (job is None or not job.is_stalled):
                self._tasks[task] = job = self._waiting.pop()
                # Nobody waits any longer if the request was cancelled.
                if not job.score.done():
                    job.is_stalled = False
                    await self._settle(job)
        finally:
            if job is not None and job.is_stalled:
                self._stalled -= 1
            else:
                self._busy -= 1
            self._dispatch()

    async def _settle(self, job: _Job) -> None:
        """Have one job judged, or put it back if its worker was lost."""
        try:
            score = await self._judged_by_worker(job)
            if score is None:
                self._waiting.put_back(job)
            elif not job.score.done():
                job.score.set_result(score)
        except Exception as error:
            # A fault of this service or its verifier: the request must learn of it instead of waiting.
            if not job.score.done():
                job.score.set_exception(error)

    async def _judged_by_worker(self, job: _Job) -> Score | None:
        """Return the score, or None if the worker was lost and the item must be judged again."""
        worker = None
        try:
            worker = await self._take_worker()
            if job.score.done():
                # The request was given up while its worker started.
                self._release(worker)
                return self._verifier.failed_score(job.item)
            score = await self._score_within_limit(worker, job)
        except TimeoutError as error:
            self._end(worker)
            job.starved += isinstance(error, Starved)
            if isinstance(error, Starved) and job.starved < MAX_STARVED:
                logger.warning("%s; its item is judged again", error)
                return None
            self.counts.timed_out += 1
            limit = self._item_timeout_seconds
            logger.warning("no verdict within %g s of processor time: %s", limit, job.item.excerpt)
            return replace(self._verifier.failed_score(job.item), timed_out=True)
        except VerifierFailed as error:
            self._release(worker)
            return self._failed(job, error)
        except WorkerLost as error:
            if worker is not None:
                self._end(worker)
            return self._lost(job, error, had_worker=worker is not None)
        except BaseException:
            # Cancelled, or a fault of ours: a reply may still come, and must not be taken for that of another item.
            if worker is not None:
                self._end(worker)
            raise
        self._release(worker)
        self.counts.worker += 1
        return score

    async def _score_within_limit(self, worker: WorkerProcess, job: _Job) -> Score:
        loop = asyncio.get_running_loop()
        started = loop.time()
        stall = loop.call_later(STALLED_SECONDS, self._let_others_pass, job)
        job.judging = asyncio.current_task()
        try:
            return await worker.judge(job.item, patience_seconds=self._item_timeout_seconds)
        finally:
            job.judging = None
            stall.cancel()
            self._mean_seconds += 0.05 * (loop.time() - started - self._mean_seconds)

    def _let_others_pass(self, job: _Job) -> None:
        if self._stalled >= STALLED_PER_WORKER * self._workers:
            return
        job.is_stalled = True
        self._busy -= 1
        self._stalled += 1
        self._dispatch()

    async def _take_worker(self) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_usable:
                return worker
            self._end(worker)
        return await self._new_worker()

    async def _new_worker(self) -> WorkerProcess:
        worker = await WorkerProcess.start(self._verifier, limits=self._worker_limits, context=start_context())
        self._alive.add(worker)
        return worker

    def _release(self, worker: WorkerProcess | None) -> None:
        """Keep a worker for the next item, unless it is gone, used up, or one too many."""
        assert worker is not None
        if worker.is_usable and self._is_running and len(self._idle) < self._workers:
            self._idle.append(worker)
        else:
            self._end(worker)

    def _end(self, worker: WorkerProcess | None) -> None:
        assert worker is not None
        worker.kill()
        self._alive.discard(worker)
        # On a busy machine they need some time to exit, and `stop` must leave none of them running.
        self._killed = [*(one for one in self._killed if one.is_running), worker]

    def _lost(self, job: _Job, error: WorkerLost, *, had_worker: bool) -> Score | None:
        """None, or after too many losses a wrong answer; raises PoolUnavailable if no worker can be started."""
        self.counts.lost_workers += 1
        job.lost_workers += had_worker
        job.failed_starts += not had_worker
        if job.lost_workers >= MAX_LOST_WORKERS:
            return self._failed(job, error)
        if job.failed_starts >= MAX_FAILED_STARTS:
            raise PoolUnavailable(str(error), retry_after_seconds=1) from error
        logger.warning("%s; its item is judged again", error)
        return None

    def _failed(self, job: _Job, error: Exception) -> Score:
        self.counts.failed += 1
        logger.warning("the verifier failed with %s: %s", error, job.item.excerpt)
        return self._verifier.failed_score(job.item)


def judge_of(verifier: Verifier, *, workers: int, item_timeout_seconds: float, limits: ServiceLimits) -> PooledJudge:
    """Return the judge of a verifier: a pool, which for one that asks others is of the verifier's own type."""
    judge_type = verifier.judge_type() if isinstance(verifier, AskingVerifier) else VerifierPool
    return judge_type(verifier, workers=workers, item_timeout_seconds=item_timeout_seconds, limits=limits)


UNLIMITED_QUEUE = ServiceLimits(max_queued_items=sys.maxsize)
"""Callers wait for their own items, however many, so no caller is refused."""


class BlockingPool:
    """Scores items from `start` to `stop`; several threads may call `judge` at a time.

    Without a `stop`, its workers end with this process.
    """

    def __init__(
        self, verifier: Verifier, *, workers: int, item_timeout_seconds: float, limits: ServiceLimits = UNLIMITED_QUEUE
    ) -> None:
        self._pool = judge_of(verifier, workers=workers, item_timeout_seconds=item_timeout_seconds, limits=limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def worker_pids(self) -> list[int]:
        return self._pool.worker_pids

    def start(self) -> None:
        """Start the workers; raises RuntimeError if one does not come up, NotReady if nobody can be asked."""
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
