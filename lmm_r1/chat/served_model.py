"""A checkpoint that answers many clients: their conversations wait in one queue, and one thread computes them together."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lmm_r1.chat.chat_model import ChatModel
from lmm_r1.data.messages import Row
from lmm_r1.generation.engine import Outcome, SamplingSettings
from remote_rm.service.judge import STOPPING, PoolUnavailable, check_room

logger = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """The engine broke while it answered; the log has its traceback."""


@dataclass(kw_only=True, eq=False)
class _Job:
    row: Row
    sampling: SamplingSettings
    outcome: asyncio.Future[Outcome]


class _Taken(Iterator[tuple[int, Row]]):
    """The conversations at the head of a queue with the settings of the first, by numbers; more may come to it meanwhile."""

    def __init__(self, waiting: deque[_Job]) -> None:
        self._waiting = waiting
        self._number = itertools.count()
        self.sampling = waiting[0].sampling
        self.jobs: dict[int, _Job] = {}
        """Those that are being answered."""

    def __next__(self) -> tuple[int, Row]:
        while self._waiting and self._waiting[0].sampling == self.sampling:
            job = self._waiting.popleft()
            # Else its client has gone away.
            if not job.outcome.done():
                number = next(self._number)
                self.jobs[number] = job
                return number, job.row
        raise StopIteration


class ServedModel:
    """Answers conversations in the order in which they come; those with the same sampling settings are computed together.

    Belongs to the event loop that `start` ran in. One thread loads the engine and runs it: PyTorch gives each thread that
    computes threads of its own, which on a CPU would stand in one another's way.
    """

    def __init__(self, load: Callable[[], ChatModel], *, max_waiting: int) -> None:
        """Load the model, whose errors are raised here.

        Args:
            max_waiting: responses that may wait; a conversation beyond is refused, unless none waits.
        """
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.model = self._thread.submit(load).result()
        self._waiting: deque[_Job] = deque()
        self._open: set[_Job] = set()
        self._has_jobs = asyncio.Event()
        self._is_refusing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answering: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many responses wait."""
        return sum(job.sampling.n_samples for job in list(self._waiting))

    @property
    def open(self) -> int:
        """How many conversations wait or are being answered."""
        return len(self._open)

    async def start(self) -> None:
        """Answer what comes from now on."""
        self._loop = asyncio.get_running_loop()
        self._answering = self._loop.create_task(self._answer_all())

    def refuse(self) -> None:
        """Take on nothing from now on; `answer` raises PoolUnavailable, for what is at hand too."""
        self._is_refusing = True
        for job in self._open:
            if not job.outcome.done():
                job.outcome.set_exception(PoolUnavailable(STOPPING, retry_after_seconds=1))

    async def stop(self) -> None:
        """Drop what waits, see the responses at hand through, and free the model's memory."""
        self.refuse()
        assert self._answering is not None, "start() comes first"
        self._answering.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self.model.engine.close)
        self._thread.shutdown()

    async def answer(self, row: Row, sampling: SamplingSettings) -> Outcome:
        """Return how a conversation went; cancelled, it frees its place in the queue.

        Raises:
            PoolUnavailable: too many wait, or the server is stopping.
            EngineFailed: the engine broke.
        """
        if self._is_refusing:
            raise PoolUnavailable(STOPPING, retry_after_seconds=1)
        check_room(
            waiting=self.waiting,
            more=sampling.n_samples,
            max_queued_items=self._max_waiting,
            what="responses wait to be generated",
            retry_after_seconds=1.0,
        )
        job = _Job(row=row, sampling=sampling, outcome=asyncio.get_running_loop().create_future())
        self._open.add(job)
        self._waiting.append(job)
        self._has_jobs.set()
        try:
            return await job.outcome
        finally:
            job.outcome.cancel()
            self._open.discard(job)

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._has_jobs.wait()
            self._has_jobs.clear()
            await loop.run_in_executor(self._thread, self._answer_waiting)

    def _answer_waiting(self) -> None:
        """Answer until none waits, in the engine's thread."""
        while self._waiting:
            taken = _Taken(self._waiting)
            try:
                for outcome in self.model.engine.respond(taken, taken.sampling):
                    self._settle(taken.jobs.pop(outcome.index), outcome)
                    if self._is_refusing:
                        return
            except Exception:  # whatever an engine raises is reported to all who wait, and the server goes on
                logger.exception("the engine failed in %d conversations", len(taken.jobs))
                for job in taken.jobs.values():
                    self._settle(job, EngineFailed("the engine failed; the server's log says how"))

    def _settle(self, job: _Job, outcome: Outcome | EngineFailed) -> None:
        def settle() -> None:
            if job.outcome.done():
                return
            if isinstance(outcome, EngineFailed):
                job.outcome.set_exception(outcome)
            else:
                job.outcome.set_result(outcome)

        assert self._loop is not None, "start() comes first"
        self._loop.call_soon_threadsafe(settle)
