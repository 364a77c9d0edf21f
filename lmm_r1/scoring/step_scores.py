"""What is made of the scores of a response's steps, and which checkpoints give such scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmm_r1.config.batch_inference import BatchConfig, StepScores
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.step_tokens import stored_tokens
from remote_rm.verifier import Score


def _mean(scores: Sequence[float]) -> float:
    return math.fsum(scores) / len(scores)


MADE_OF_STEPS: Mapping[StepScores, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "last": lambda scores: scores[-1],
    "mean": _mean,
}


@dataclass(frozen=True, kw_only=True)
class StepJudging:
    """How steps are judged, as flags say it."""

    step_scores: StepScores
    """What their scores make of a response's reward."""
    placeholder_token: str | None
    """None takes what the checkpoint's config says."""
    reward_tokens: tuple[str, ...]
    """Of a right step and of a wrong one; none take what the checkpoint's config says."""

    def is_of(self, checkpoint: Checkpoint, *, of_whole: Sequence[str]) -> bool:
        """Say whether a reward model is one of steps, by its config or by flags.

        Args:
            of_whole: the flags that were given which only a reward model of whole responses has.

        Raises:
            UserError: flags were given that are for the other kind.
        """
        path, config = checkpoint.path, checkpoint.config
        # What was trained further keeps what its config said before, and a value head says what it is now.
        stored = stored_tokens(config) is not None and not hasattr(config, "value_head_prefix")
        of_steps = self.placeholder_token is not None or stored
        if of_steps and of_whole:
            raise UserError(
                f"{of_whole[0]}: {path} is a process reward model, whose scores are probabilities; leave it out"
            )
        if not of_steps and (self.reward_tokens or self.step_scores != DEFAULT_JUDGING.step_scores):
            given = "--reward_tokens" if self.reward_tokens else f"--step_scores {self.step_scores}"
            raise UserError(
                f"{given}: {path} is no process reward model, by its config; leave it out, or give --placeholder_token"
            )
        return of_steps


DEFAULT_JUDGING = StepJudging(
    step_scores=BatchConfig.step_scores,
    placeholder_token=BatchConfig.placeholder_token,
    reward_tokens=BatchConfig.reward_tokens,
)


def score_of_steps(scores: Sequence[float], *, kind: StepScores) -> Score:
    """Return the score of a response by those of its steps: the number of steps and all that could be made of them as parts.

    A response without steps has the reward 0. Nothing is checked: where a step's score is no finite number, some part is none.
    """
    found = {name: make(scores) if scores else 0.0 for name, make in MADE_OF_STEPS.items()}
    parts = {"steps": float(len(scores)), **{f"steps_{name}": value for name, value in found.items()}}
    return Score(reward=found[kind], score=found[kind], parts=parts)


def not_finite(score: Score) -> float | None:
    """Return a number of the score that is not finite, None where all are."""
    numbers = (score.reward, *score.parts.values())
    return next((number for number in numbers if not math.isfinite(number)), None)
