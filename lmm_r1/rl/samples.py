"""Samples as they are trained on: tensors without padding, to which models, rewards and estimator add theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lmm_r1.data.sample import Sample, SentMedia
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.rl.mismatch import ROWS_WITH, Modality, modality_of


@dataclass(kw_only=True, eq=False)
class TrainingSample(ModelSample):
    """A sample that is trained on; a tensor of A = L - 1 entries is about the token after each but the last."""

    place: int
    """Its place in the rollout."""
    group: int
    """The number of its prompt in the rollout: samples of a group share prompt and media."""
    location: str
    """Where its row comes from, for errors."""
    prompt_tokens: int
    """How many of its first tokens are the prompt's, those of its images included."""
    turns: torch.Tensor
    """(A,), the number of the policy's turn from 0; -1 for tokens that the policy did not generate."""
    engine_log_probs: torch.Tensor | None
    """(A,), those that the engine sampled by."""
    media: SentMedia  # type: ignore[assignment]  # workers fetch it
    columns: Mapping[str, Any]
    """Of the row's record."""
    modality: Modality
    reward: float | None
    """None until a reward model has given it."""
    response_tokens: int
    """How many tokens the policy generated."""
    truncated: bool
    masked: bool
    """Whether it is left out of the loss and of the comparison within its group."""
    logged: dict[str, float] = field(default_factory=dict)
    """Values of which the means over the rollout are logged."""
    log_probs: torch.Tensor | None = None
    """(A,), the policy's before the update; None if the update's own pass gives them."""
    reference_log_probs: torch.Tensor | None = None  # (A,)
    values: torch.Tensor | None = None  # (A,)
    kl: torch.Tensor | None = None
    """(A,), what reduces the rewards of tokens."""
    advantages: torch.Tensor | None = None  # (A,)
    returns: torch.Tensor | None = None  # (A,)

    @classmethod
    def of(
        cls, sample: Sample, *, max_len: int, place: int = 0, group: int = 0, logs_masked: bool = False
    ) -> TrainingSample:
        """Return a sample of an engine.

        Args:
            logs_masked: whether single responses may be masked, in addition to episodes.
        """
        token_ids, log_probs = sample.token_ids, sample.log_probs
        location = sample.row.location
        assert len(token_ids) <= max_len, f"{location}: no engine gives {len(token_ids)} of {max_len} tokens"
        reward, modality = sample.reward, modality_of(sample.row)
        logged = {} if reward is None else {"reward": reward.reward, "score": reward.score, **reward.parts}
        logged |= {name: float(kind == modality) for kind, name in ROWS_WITH.items()}
        logged |= {"response_length": float(sample.generated_tokens), "total_length": float(len(token_ids))}
        if logs_masked or sample.played is not None:
            logged["masked"] = float(sample.masked)
        turns = torch.full((len(token_ids),), -1)
        for number, (start, end) in enumerate(sample.action_ranges):
            turns[start:end] = number
        return cls(
            place=place,
            group=group,
            location=location,
            token_ids=torch.tensor(token_ids),
            prompt_tokens=len(sample.segments[0].token_ids),
            loss_mask=torch.tensor(sample.loss_mask[1:], dtype=torch.bool),
            turns=turns[1:],
            engine_log_probs=None if log_probs is None else torch.tensor(log_probs[1:]),
            media=sample.media or None,
            columns=sample.row.columns,
            modality=modality,
            reward=None if reward is None else reward.reward,
            response_tokens=sample.generated_tokens,
            truncated=sample.truncated,
            masked=sample.masked,
            logged=logged,
        )

    def trained_part(self) -> TrainingSample:
        """Return what an update takes of it: only the prompt of a masked sample.

        No loss then counts it or divides by it, neither its tokens nor the sample: sum_i M_i A_i L_i / sum_i M_i (Mini-o3,
        arXiv:2509.07969). Entropy and KL leave it out as well. Its group computes its prompt anyway.
        """
        prompt = self.prompt_tokens
        if not self.masked or prompt == len(self.token_ids):
            return self
        cut: dict[str, Any] = {
            name: value[: prompt if name == "token_ids" else prompt - 1]
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        kept = tuple(item for item in self.media or () if item.start < prompt)
        return replace(self, **cut, media=kept or None)
