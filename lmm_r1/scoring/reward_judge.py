"""Serves a reward model over HTTP: encodes and scores samples in batches, with the protocol and limits of `remote_rm`'s servers."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fastapi import FastAPI

from lmm_r1.data.messages import Row
from lmm_r1.data.sent_prompt import MediaAccess, ending_of
from lmm_r1.errors import UserError
from remote_rm.protocol import RewardRequest
from remote_rm.service.app import create_service, limits_of, serve_app
from remote_rm.verifier import JudgeCounts, PoolUnavailable, Score, ServiceLimits, UnusableItem

if TYPE_CHECKING:
    from lmm_r1.lmm_kits import EncodedPrompt
    from lmm_r1.scoring.reward_model import EncodedSample, RewardModel


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One sample as it was sent."""

    query: str
    prompt: str
    response: str | None
    label: str


@dataclass(kw_only=True, eq=False)
class _QueuedSample:
    item: RewardItem
    place: str
    """The sample's place in its request."""
    row: Row | None
    """None for a sample that is text."""
    sample: EncodedSample | None = None
    score: Future[Score] = field(default_factory=Future)


class RewardModelJudge:
    """Scores samples in the order of arrival, as many at a time as a batch holds tokens.

    One thread loads the model and uses it, because PyTorch gives each computing thread its own threads, which would
    compete on a CPU.
    """

    name = "reward_model"
    """In `GET /health`."""

    def __init__(self, load: Callable[[], RewardModel], *, media: MediaAccess) -> None:
        """Load the model; raises its errors."""
        self.counts = JudgeCounts()
        self.waiting = 0
        """The number of samples that have no score yet."""
        self._media = media
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")
        self._model = self._thread.submit(load).result()
        self._queue: deque[_QueuedSample] = deque()

    async def start(self) -> None:
        """Do nothing: the model was loaded."""

    async def stop(self) -> None:
        """Stop after the current batch; `judge` raises PoolUnavailable for samples that still wait."""
        while self._queue:
            self._settle(self._queue.popleft(), PoolUnavailable("the server was stopped"))
        await asyncio.to_thread(self._thread.shutdown)

    async def judge(self, items: Sequence[RewardItem]) -> list[Score]:
        """Return the scores in the items' order; cancelling it frees what still waits.

        Raises UnusableItem for a sample that cannot be scored, and PoolUnavailable if the server stops.
        """
        self.counts.items += len(items)
        self.waiting += len(items)
        jobs: list[_QueuedSample] = []
        try:
            # Fetching images must not block the event loop or the model.
            jobs += await asyncio.to_thread(self._read, items)
            self._queue.extend(jobs)
            self._thread.submit(self._score_queue)
            return list(await asyncio.gather(*(asyncio.wrap_future(job.score) for job in jobs)))
        except UserError as error:
            self.counts.failed += 1
            raise UnusableItem(str(error)) from error
        finally:
            self.waiting -= len(items)
            for job in jobs:
                job.score.cancel()

    def _read(self, items: Sequence[RewardItem]) -> list[_QueuedSample]:
        """Return the samples with their rows; a prompt that several samples share is read once."""
        rows: dict[str, Row | None] = {}
        jobs: list[_QueuedSample] = []
        for index, item in enumerate(items):
            place = f"prompts[{index}]"
            if item.response is not None and item.prompt not in rows:
                rows[item.prompt] = self._media.row_of(item.prompt, location=place)
            row = None if item.response is None else rows[item.prompt]
            if row is None:
                jobs.append(_QueuedSample(item=item, place=f"query[{index}]", row=None))
            else:
                jobs.append(_QueuedSample(item=item, place=place, row=replace(row, location=place)))
        return jobs

    def _score_queue(self) -> None:
        """Score all waiting samples, in the model's thread."""
        while batch := self._next_batch():
            self._score(batch)

    def _next_batch(self) -> list[_QueuedSample]:
        """Encode waiting samples until a batch is full."""
        batch: list[_QueuedSample] = []
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
                said = str(error)
                self._settle(job, UnusableItem(said if said.startswith(job.place) else f"{job.place}: {said}"))
                continue
            except Exception as error:
                # A fault of this service: report it to the request, and continue with the others.
                logger.exception("%s cannot be encoded", job.place)
                self._settle(job, error)
                continue
            if batch and tokens + len(job.sample.token_ids) > self._model.max_batch_tokens:
                self._queue.appendleft(job)
                break
            batch.append(job)
            tokens += len(job.sample.token_ids)
        return batch

    def _encoded(self, job: _QueuedSample, prompts: dict[str, EncodedPrompt]) -> EncodedSample:
        item = job.item
        if job.row is None or item.response is None:
            return self._model.encode_text(item.query, prompt=item.prompt)
        if item.prompt not in prompts:
            prompts[item.prompt] = self._model.encode_prompt(job.row)
        # The query shows which token ended the response.
        ending = self._model.known_ending(ending_of(item.query, response=item.response))
        return self._model.encode(job.row, item.response, ending=ending, prompt=prompts[item.prompt])

    def _score(self, batch: Sequence[_QueuedSample]) -> None:
        try:
            rewards = self._model.score([job.sample for job in batch if job.sample is not None])
        except Exception as error:
            # One sample may be too large for the machine; it must not make those of other requests fail.
            logger.exception("a batch of %d samples failed", len(batch))
            if len(batch) == 1:
                self._settle(batch[0], error)
            else:
                for job in batch:
                    self._score([job])
            return
        for job, reward in zip(batch, rewards, strict=True):
            if math.isfinite(reward):
                self._settle(job, Score(reward=reward, score=reward, parts={}))
            else:
                said = f"{job.place}: the reward model gives {reward} for it, which is not a reward"
                self._settle(job, UnusableItem(said))

    def _settle(self, job: _QueuedSample, outcome: Score | Exception) -> None:
        with suppress(InvalidStateError):  # nobody waits any more
            if isinstance(outcome, Score):
                self.counts.worker += 1
                job.score.set_result(outcome)
            else:
                self.counts.failed += 1
                job.score.set_exception(outcome)


def items_of_request(request: RewardRequest) -> list[RewardItem]:
    """Return the samples of a request; OpenRLHF's own requests have rendered queries instead of responses."""
    responses = [None] * len(request.query) if request.responses is None else request.responses
    return [
        RewardItem(query=query, prompt=prompt, response=response, label=label)
        for query, prompt, response, label in zip(
            request.query, request.prompts, responses, request.labels, strict=True
        )
    ]


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
