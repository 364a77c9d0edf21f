"""Serves a reward model over HTTP: encodes and scores samples in batches, with the protocol and limits of `remote_rm`'s servers."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fastapi import FastAPI

from lmm_r1.data.messages import Row
from lmm_r1.data.sent_prompt import MediaAccess, ending_of
from lmm_r1.errors import UserError
from remote_rm.protocol import RewardRequest
from remote_rm.service.app import create_service
from remote_rm.service.server import limits_of, serve_app
from remote_rm.verifier import JudgeCounts, PoolUnavailable, Score, ServiceLimits, UnusableItem

if TYPE_CHECKING:
    from lmm_r1.lmm_kits import EncodedPrompt
    from lmm_r1.scoring.reward_model import EncodedSample, RewardModel


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One sample as it was sent."""

    query: str
    prompt: str
    response: str | None
    label: str


logger = logging.getLogger(__name__)

READERS = 4
"""Threads that parse prompts and fetch images, to not block the event loop or the model."""


@dataclass(kw_only=True, eq=False)
class _QueuedSample:
    item: RewardItem
    place: str
    """The sample's place in its request."""
    row: Row | None
    """None for a sample that is text."""
    score: asyncio.Future[Score]
    sample: EncodedSample | None = None


Outcome = tuple[_QueuedSample, "Score | Exception"]


class RewardModelJudge:
    """Scores samples in the order of arrival, as many at a time as a batch holds tokens.

    Belongs to the event loop in which `start` ran. One thread loads the model and uses it, because PyTorch gives each
    computing thread its own threads, which would compete on a CPU.
    """

    name = "reward_model"
    """In `GET /health`."""

    def __init__(self, load: Callable[[], RewardModel], *, media: MediaAccess) -> None:
        """Load the model; raises its errors."""
        self.counts = JudgeCounts()
        self._media = media
        self._model_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")
        self._model = self._model_thread.submit(load).result()
        self._readers = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="prompt reader")
        self._queue: deque[_QueuedSample] = deque()
        self._open: set[_QueuedSample] = set()
        self._reading = 0
        self._computing: asyncio.Task[None] | None = None
        self._has_jobs = asyncio.Event()

    @property
    def waiting(self) -> int:
        """The number of samples that have no score yet."""
        return self._reading + len(self._open)

    async def start(self) -> None:
        """Start computing."""
        self._computing = asyncio.get_running_loop().create_task(self._compute())

    async def stop(self) -> None:
        """Stop after the current batch; `judge` raises PoolUnavailable for unanswered samples."""
        assert self._computing is not None
        self._computing.cancel()
        self._computing = None
        for job in self._open:
            if not job.score.done():
                job.score.set_exception(PoolUnavailable("the server was stopped"))
        self._readers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._model_thread.shutdown)

    async def judge(self, items: Sequence[RewardItem]) -> list[Score]:
        """Return the scores in the items' order; cancelling it frees what still waits.

        Raises UnusableItem for a sample that cannot be scored, and PoolUnavailable if the server stops.
        """
        if self._computing is None:
            raise RuntimeError("the judge is not running; call start() first")
        self.counts.items += len(items)
        jobs = await self._read(items)
        self._open.update(jobs)
        self._queue.extend(jobs)
        self._has_jobs.set()
        try:
            return list(await asyncio.gather(*(job.score for job in jobs)))
        finally:
            for job in jobs:
                job.score.cancel()
                self._open.discard(job)

    async def _read(self, items: Sequence[RewardItem]) -> list[_QueuedSample]:
        loop = asyncio.get_running_loop()
        self._reading += len(items)
        try:
            places = await loop.run_in_executor(self._readers, self._rows_of, items)
        except UserError as error:
            self.counts.failed += 1
            raise UnusableItem(str(error)) from error
        finally:
            self._reading -= len(items)
        return [
            _QueuedSample(item=item, place=place, row=row, score=loop.create_future())
            for item, (place, row) in zip(items, places, strict=True)
        ]

    def _rows_of(self, items: Sequence[RewardItem]) -> list[tuple[str, Row | None]]:
        """Return each sample's place in its request and its row; a prompt that several samples share is read once."""
        rows: dict[str, Row | None] = {}
        places: list[tuple[str, Row | None]] = []
        for index, item in enumerate(items):
            place = f"prompts[{index}]"
            if item.response is None:
                places.append((f"query[{index}]", None))
                continue
            if item.prompt not in rows:
                rows[item.prompt] = self._media.row_of(item.prompt, location=place)
            row = rows[item.prompt]
            places.append((f"query[{index}]", None) if row is None else (place, replace(row, location=place)))
        return places

    async def _compute(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._has_jobs.wait()
            self._has_jobs.clear()
            while self._queue:
                for job, outcome in await loop.run_in_executor(self._model_thread, self._next_batch):
                    self._settle(job, outcome)

    def _settle(self, job: _QueuedSample, outcome: Score | Exception) -> None:
        if isinstance(outcome, Score) and not math.isfinite(outcome.reward):
            outcome = UnusableItem(
                f"{job.place}: the reward model gives {outcome.reward} for it, which is not a reward"
            )
        if isinstance(outcome, Score):
            self.counts.worker += 1
        else:
            self.counts.failed += 1
        if job.score.done():
            return
        if isinstance(outcome, Score):
            job.score.set_result(outcome)
        else:
            job.score.set_exception(outcome)

    def _next_batch(self) -> list[Outcome]:
        """Encode waiting samples until a batch is full, and score them; runs in the model's thread, never raises."""
        batch: list[_QueuedSample] = []
        outcomes: list[Outcome] = []
        prompts: dict[str, EncodedPrompt] = {}
        tokens = 0
        while self._queue:
            job = self._queue.popleft()
            # The request was cancelled, or another of its samples failed.
            if job.score.done():
                continue
            try:
                job.sample = job.sample or self._encoded(job, prompts)
            except UserError as error:
                outcomes.append((job, UnusableItem(_placed(str(error), place=job.place))))
                continue
            except Exception as error:
                # A fault of this service: report it to the request, and continue with the others.
                logger.exception("%s cannot be encoded", job.place)
                outcomes.append((job, error))
                continue
            if batch and tokens + len(job.sample.token_ids) > self._model.max_batch_tokens:
                self._queue.appendleft(job)
                break
            batch.append(job)
            tokens += len(job.sample.token_ids)
        return outcomes + self._scored(batch)

    def _encoded(self, job: _QueuedSample, prompts: dict[str, EncodedPrompt]) -> EncodedSample:
        item = job.item
        if job.row is None or item.response is None:
            return self._model.encode_text(item.query, prompt=item.prompt)
        if item.prompt not in prompts:
            prompts[item.prompt] = self._model.encode_prompt(job.row)
        # The query shows which token ended the response.
        ending = self._model.known_ending(ending_of(item.query, response=item.response))
        return self._model.encode(job.row, item.response, ending=ending, prompt=prompts[item.prompt])

    def _scored(self, batch: Sequence[_QueuedSample]) -> list[Outcome]:
        samples = [job.sample for job in batch if job.sample is not None]
        try:
            scores = [Score(reward=reward, score=reward, parts={}) for reward in self._model.score(samples)]
            return list(zip(batch, scores, strict=True))
        except Exception as error:
            # One sample may be too large for the machine; it must not make those of other requests fail.
            logger.exception("a batch of %d samples failed", len(batch))
            if len(batch) == 1:
                return [(batch[0], error)]
        return [outcome for job in batch for outcome in self._scored([job])]


def items_of_request(request: RewardRequest) -> list[RewardItem]:
    """Return the samples of a request; OpenRLHF's own requests have rendered queries instead of responses."""
    responses = [None] * len(request.query) if request.responses is None else request.responses
    return [
        RewardItem(query=query, prompt=prompt, response=response, label=label)
        for query, prompt, response, label in zip(
            request.query, request.prompts, responses, request.labels, strict=True
        )
    ]


def _placed(sentence: str, *, place: str) -> str:
    return sentence if sentence.startswith(place) else f"{place}: {sentence}"


def create_app(
    load: Callable[[], RewardModel], *, media: MediaAccess, limits: ServiceLimits, token: str | None
) -> FastAPI:
    """Return the application of the model that `load` returns; raises its errors."""
    judge = RewardModelJudge(load, media=media)
    return create_service(judge, items_of_request=items_of_request, limits=limits, token=token)


def serve(load: Callable[[], RewardModel], *, media: MediaAccess, args: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM; exits with code 1 if it cannot listen, and raises what `load` raises.

    Args:
        args: the flags of `remote_rm.registry.add_listening_arguments`.
    """
    serve_app(lambda token: create_app(load, media=media, limits=limits_of(args), token=token), args)
