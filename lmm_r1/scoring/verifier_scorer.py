"""Rewards by a verifier in worker processes of the run's own, without a reward service."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence

from lmm_r1.data.messages import Row, to_json
from lmm_r1.errors import UserError
from lmm_r1.scoring.response_scores import JUDGE_SECONDS, Judge
from lmm_r1.scoring.scored_response import ScoredResponse
from remote_rm.service.judge import PoolUnavailable
from remote_rm.verifier import Item, Score

# Of each engine: one answer takes a millisecond, an expression that must be simplified up to a second.
MOST_WORKERS = 4


class VerifierScorer:
    """A verifier that is given all responses to one prompt at once; its workers start with the first of them."""

    def __init__(self, spec: str) -> None:
        """Take a verifier by the name that `verifier_from` reads; raises UserError for one that there is not."""
        workers = min(MOST_WORKERS, os.cpu_count() or 1)
        self._judge = Judge(spec, workers=workers, item_timeout_seconds=JUDGE_SECONDS, flag="--reward.remote_url")
        self._starting = threading.Lock()
        self._started = False

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row whose answer the verifier cannot judge by."""
        self._judge.check_labels(rows)

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the score of each response, in their order; raises UserError where the workers cannot be had."""
        prompt = to_json(batch[0].row.messages)
        items = [
            Item(prompt=prompt, response=item.response, label=item.row.answer, image_scales=item.image_scales)
            for item in batch
        ]
        return await asyncio.to_thread(self._judged, items)

    def _judged(self, items: Sequence[Item]) -> list[Score]:
        self._start()
        try:
            return self._judge.judge(items)
        except PoolUnavailable as error:
            raise UserError(f"--reward.remote_url {self._judge.name}: {error}") from error

    def _start(self) -> None:
        with self._starting:
            if not self._started:
                self._judge.__enter__()
                self._started = True

    async def check_health(self) -> None:
        """Start the workers; raises UserError where a model that is to judge cannot be asked."""
        await asyncio.to_thread(self._start)

    async def close(self) -> None:
        """End the workers."""
        if self._started:
            await asyncio.to_thread(self._judge.__exit__, None, None, None)
            self._started = False
