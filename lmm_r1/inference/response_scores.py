"""Scores of responses: by a verifier, which compares them with the row's answer, or by a reward model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmm_r1.data.messages import Row, to_json
from lmm_r1.errors import UserError
from lmm_r1.evaluation.judging import Judge
from lmm_r1.inference.completion import Completion
from remote_rm.verifier import Item

JUDGE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class ResponseScore:
    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """The verdicts that the reward was formed from; none for a reward model."""


class ResponseScorer(Protocol):
    def score(self, row: Row, completions: Sequence[Completion]) -> list[ResponseScore]:
        """Return one score per completion; raises UserError for a row that cannot be scored."""


class VerifierScorer:
    """Scores by a rule."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def score(self, row: Row, completions: Sequence[Completion]) -> list[ResponseScore]:
        """Return the verdicts; raises UserError for a row whose answer the verifier cannot judge by."""
        self._judge.check_labels([row])
        prompt = to_json(row.messages)
        items = [Item(prompt=prompt, response=completion.text, label=row.answer) for completion in completions]
        judgements = self._judge.judge(items)
        return [
            ResponseScore(
                reward=judgement.score.reward,
                parts={**judgement.score.parts, **({"timed_out": 1.0} if judgement.timed_out else {})},
            )
            for judgement in judgements
        ]


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
        from lmm_r1.config.ppo import PPODeepSpeedConfig
        from lmm_r1.inference.reward_model import RewardModel
        from lmm_r1.inference.transformers_engine import torch_dtype
        from lmm_r1.lmm_kits import Checkpoint
        from lmm_r1.models.loading import DTYPES

        checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
        precision = torch_dtype(dtype, config=checkpoint.config)
        self._model = RewardModel(
            path,
            dtype=next(name for name, known in DTYPES.items() if known == precision),
            max_len=max_len,
            max_batch_tokens=max_batch_tokens,
            value_head_prefix=PPODeepSpeedConfig.value_head_prefix,
            normalize=normalize,
            trust_remote_code=trust_remote_code,
        )
        self._path = path

    def score(self, row: Row, completions: Sequence[Completion]) -> list[ResponseScore]:
        """Return the rewards; raises UserError for a row that the model cannot take."""
        samples = [
            # A response that was cut off has no end token, in training neither.
            self._model.encode(row, completion.text, ending=None if completion.finish_reason == "stop" else "")
            for completion in completions
        ]
        rewards = self._model.score(samples)
        for reward in rewards:
            if not math.isfinite(reward):
                raise UserError(f"{row.location}: {self._path} gives the reward {reward}; is the checkpoint whole?")
        return [ResponseScore(reward=reward) for reward in rewards]


@contextlib.contextmanager
def verifier_scorer(name: str, *, workers: int) -> Iterator[VerifierScorer]:
    """Give a scorer whose worker processes run as long as the block."""
    with Judge(name, workers=workers, item_timeout_seconds=JUDGE_SECONDS) as judge:
        yield VerifierScorer(judge)
