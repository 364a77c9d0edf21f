"""Scores of responses: by a verifier, which compares them with the row's answer, or by a reward model."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from lmm_r1.config.rewards import verifier_from
from lmm_r1.data.messages import Row, to_json
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.scoring import ScoredResponse
from remote_rm.client import RewardClient, RewardRefused, RewardUnavailable, SentSample
from remote_rm.service.pool import BlockingPool
from remote_rm.verifier import Item, NotReady, PoolUnavailable, Score

if TYPE_CHECKING:
    from typing_extensions import Self


JUDGE_SECONDS = 5.0


class ResponseScorer(Protocol):
    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return one score per response; raises UserError for a row that cannot be scored."""


class VerifierJudge:
    """Scores by a verifier, in `with VerifierJudge(...)`, or for training, which awaits `rewards`.

    Its worker processes are killed at a time limit, so that no response can hang a command.
    """

    one_by_one = False

    def __init__(
        self, verifier_name: str, *, workers: int, item_timeout_seconds: float, flag: str = "--reward"
    ) -> None:
        """Take a verifier by the name that `verifier_from` reads; raises UserError for an unknown one.

        Args:
            item_timeout_seconds: an answer that takes longer counts as wrong, and its score says so.
            flag: the flag that names the verifier, for messages.
        """
        self.name = verifier_name
        self._told = f"{flag} {verifier_name}"
        self.verifier = verifier_from(verifier_name, flag=flag)
        self._pool = BlockingPool(self.verifier, workers=workers, item_timeout_seconds=item_timeout_seconds)
        self._starting = threading.Lock()
        self._started = False

    def __enter__(self) -> Self:
        """Start the workers; raises RuntimeError if one does not start, UserError if a judge is not available."""
        with self._starting:
            if not self._started:
                try:
                    self._pool.start()
                except NotReady as error:
                    raise UserError(str(error)) from error
                self._started = True
        return self

    def __exit__(self, *raised: object) -> None:
        """End the workers, even while they judge."""
        if self._started:
            self._pool.stop()
            self._started = False

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row whose answer the verifier does not accept as a label."""
        for row in rows:
            try:
                self.verifier.check_label(row.answer)
            except ValueError as error:
                raise UserError(f"{row.location}: {self.name} cannot judge by this row's answer: {error}") from error

    def judge(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in their order; an item that is not judged in time is wrong."""
        return self._pool.judge(items)

    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return one score per response; raises UserError for a row whose answer the verifier does not accept."""
        self.check_rows([row])
        return self.judge([_item(row, response=one.text, image_scales=one.image_scales) for one in responses])

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the score of each response, in their order; raises UserError if the workers do not start."""
        items = [_item(one.row, response=one.response, image_scales=one.image_scales) for one in batch]
        try:
            scores = await asyncio.to_thread(lambda: self.__enter__().judge(items))
        except PoolUnavailable as error:
            raise UserError(f"{self._told}: {error}") from error
        return [replace(score, parts=score.parts | {"timed_out": float(score.timed_out)}) for score in scores]

    async def check_health(self) -> None:
        """Start the workers; raises UserError if a model that judges is not available."""
        await asyncio.to_thread(self.__enter__)

    async def close(self) -> None:
        """End the workers."""
        await asyncio.to_thread(self.__exit__)


def _item(row: Row, *, response: str, image_scales: tuple[tuple[float, float], ...]) -> Item:
    return Item(prompt=to_json(row.messages), response=response, label=row.answer, image_scales=image_scales)


class RewardModelScorer:
    """Scores by a trained reward model."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        max_len: int,
        max_batch_tokens: int | None,
        normalize: bool,
        trust_remote_code: bool,
    ) -> None:
        """Args: dtype: as PyTorch names it; `auto` is the checkpoint's own, else fp32."""
        import torch

        from lmm_r1.config.ppo import PPODeepSpeedConfig
        from lmm_r1.lmm_kits import Checkpoint
        from lmm_r1.models.loading import DTYPES
        from lmm_r1.scoring.reward_model import RewardModel

        config = Checkpoint(path, trust_remote_code=trust_remote_code).config
        wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
        self._model = RewardModel(
            path,
            dtype=next((name for name, known in DTYPES.items() if known == wanted), "fp32"),
            max_len=max_len,
            max_batch_tokens=max_batch_tokens,
            value_head_prefix=PPODeepSpeedConfig.value_head_prefix,
            normalize=normalize,
            trust_remote_code=trust_remote_code,
        )
        self._path = path

    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return the rewards; raises UserError for a row that the model cannot take."""
        samples = [
            # As in training, a response that was cut off has no end token.
            self._model.encode(row, response.text, ending=None if response.finish_reason == "stop" else "")
            for response in responses
        ]
        rewards = self._model.score(samples)
        for reward in rewards:
            if not math.isfinite(reward):
                raise UserError(f"{row.location}: {self._path} gives the reward {reward}; is the checkpoint complete?")
        return [Score(reward=reward, score=reward, parts={}) for reward in rewards]


class RemoteScorer:
    """Scores by reward servers; usable inside `with RemoteScorer(...)`."""

    def __init__(self, addresses: str, *, flag: str) -> None:
        """Take the addresses of servers, separated by commas; raises UserError for invalid ones.

        Args:
            flag: the flag that names them, for messages.
        """
        self._flag = f"{flag} {addresses}"
        try:
            self._client = RewardClient(addresses.split(","))
        except ValueError as error:
            raise UserError(f"{flag}: {error}") from error
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Self:
        """Raise UserError unless a reward server answers at every address."""
        try:
            self._loop.run_until_complete(self._client.check_health())
        except RewardUnavailable as error:
            self.__exit__()
            raise UserError(f"{self._flag}: {error}") from error
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the connections."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def score(self, row: Row, responses: Sequence[Completion]) -> list[Score]:
        """Return one score per response.

        Raises UserError for a row that a server refuses, and RewardUnavailable if none answers.
        """
        prompt = to_json(row.messages)
        samples = [
            SentSample(
                query=query_of(prompt, response),
                prompt=prompt,
                label=row.answer,
                response=response.text,
                further={"image_scales": response.image_scales} if response.image_scales else {},
            )
            for response in responses
        ]
        try:
            return self._loop.run_until_complete(self._client.reward_batch(samples))
        except RewardRefused as error:
            raise UserError(f"{row.location}: {error}") from error


def query_of(prompt: str, response: Completion) -> str:
    """Return prompt and response, followed by a newline if the model ended the response."""
    return f"{prompt}\n{response.text}" + ("\n" if response.finish_reason == "stop" else "")
