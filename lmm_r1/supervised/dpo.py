"""Direct preference optimization: the policy learns to prefer one of two responses to a prompt over the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lmm_r1.config import DPOConfig
from lmm_r1.config.preferences import DPOModelConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import PreferenceRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.supervised.held_out import LOSS, RunHeldOut
from lmm_r1.supervised.loop import Counts, Terms
from lmm_r1.supervised.preferences import (
    PairBatch,
    PairEncoder,
    PairSample,
    collate_pairs,
    dpo_loss,
    evaluation_pairs,
    ipo_loss,
    nll_loss,
    sides_of,
    simpo_loss,
    training_pairs,
)
from lmm_r1.supervised.reference import ReferredRun
from lmm_r1.supervised.rows import RowCheck

ACCURACY, MARGIN = "pair_accuracy", "reward_margin"


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """What a loss makes of a batch of pairs; each is (B,)."""

    loss: torch.Tensor
    nll: torch.Tensor
    """Of the chosen response, per token."""
    chosen_reward: torch.Tensor
    rejected_reward: torch.Tensor
    chosen_log_prob: torch.Tensor
    """The policy's, summed over the response."""
    rejected_log_prob: torch.Tensor

    @property
    def logged(self) -> Mapping[str, torch.Tensor]:
        """What is logged of each pair beside its loss."""
        margin = self.chosen_reward - self.rejected_reward
        return {
            ACCURACY: (margin > 0).to(margin),
            MARGIN: margin,
            "chosen_reward": self.chosen_reward,
            "rejected_reward": self.rejected_reward,
            "chosen_log_prob": self.chosen_log_prob,
            "rejected_log_prob": self.rejected_log_prob,
            "nll_loss": self.nll,
        }


def preferences(
    policy: torch.Tensor, reference: torch.Tensor | None, loss_mask: torch.Tensor, *, model: DPOModelConfig
) -> Preferences:
    """Return the loss of pairs that the flags ask for, and the responses' implicit rewards.

    Args:
        policy: log-probs of loss tokens, (2 B, T - 1), 0 elsewhere; the chosen responses stand first.
        reference: the same of the reference; None for SimPO.
        loss_mask: (2 B, T - 1).
    """
    lengths = loss_mask.sum(-1)  # (2 B,)
    log_probs = policy.sum(-1)
    ratios = log_probs if reference is None else log_probs - reference.sum(-1)
    if model.mean_log_probs or model.simpo_enable:
        ratios = ratios / lengths.clamp(min=1)
    chosen, rejected = ratios.chunk(2)
    beta, smoothing = model.beta, model.label_smoothing
    if model.ipo_enable:
        loss = ipo_loss(chosen, rejected, beta=beta)
    elif model.simpo_enable:
        loss = simpo_loss(chosen, rejected, beta=beta, gamma=model.simpo_gamma, label_smoothing=smoothing)
    else:
        loss = dpo_loss(chosen, rejected, beta=beta, label_smoothing=smoothing)
    chosen_log_prob, rejected_log_prob = log_probs.chunk(2)
    return Preferences(
        loss=loss,
        nll=nll_loss(chosen_log_prob, lengths.chunk(2)[0]),
        chosen_reward=beta * chosen,
        rejected_reward=beta * rejected,
        chosen_log_prob=chosen_log_prob,
        rejected_log_prob=rejected_log_prob,
    )


class DPORun(ReferredRun[DPOConfig, PreferenceRow, PairSample, PairBatch]):
    """The loss is the mean over pairs."""

    kind = "dpo"
    shown = (ACCURACY, MARGIN)
    encoder = PairEncoder

    @classmethod
    def read(
        cls, config: DPOConfig, check: RowCheck[PreferenceRow]
    ) -> tuple[KeptRows[PreferenceRow], KeptRows[PreferenceRow]]:
        return training_pairs(config, check=check), evaluation_pairs(config, check=check)

    @classmethod
    def conversations(cls, rows: Sequence[PreferenceRow]) -> list[Row]:
        return sides_of(rows)

    def held_out(self, rows: Sequence[PreferenceRow]) -> PairEvaluation:
        return PairEvaluation(self, rows=rows)

    def collate(self, samples: Sequence[PairSample]) -> PairBatch:
        """Return pairs as one padded batch."""
        return collate_pairs(samples, pad_token_id=self.pad_token_id)

    def counts(self, batch: PairBatch) -> Counts:
        """Return the number of pairs, and of the tokens of both responses."""
        return Counts(units=int(batch.weights.sum()), tokens=int(batch.tokens.loss_mask.sum()))

    def terms(self, batch: PairBatch) -> Terms:
        """Return the preference loss of the batch's pairs, with the weighted loss of the chosen responses."""
        found, aux_loss = self.preferences(batch)
        weights = batch.weights.to(found.loss)
        loss = found.loss + self.config.model.nll_loss_coef * found.nll
        sums = {name: (value.detach() * weights).sum() for name, value in found.logged.items()}
        return Terms(loss=(loss * weights).sum(), aux_loss=aux_loss, sums=sums)

    def preferences(self, batch: PairBatch) -> tuple[Preferences, torch.Tensor | float]:
        """Return what the loss makes of a batch, and the load-balancing loss of experts."""
        reference = None if self.reference is None else self.reference.log_probs(batch.tokens)
        policy, aux_loss = self.policy_log_probs(batch.tokens)
        mask = batch.tokens.loss_mask.to(policy.device)
        return preferences(policy, reference, mask, model=self.config.model), aux_loss


class PairEvaluation(RunHeldOut[PreferenceRow, PairSample]):
    """The means over all held-out pairs, and of each data source where there are several."""

    NAMES = (LOSS, *(f"eval_{name}" for name in (ACCURACY, MARGIN, "chosen_reward", "rejected_reward")))
    OF_SOURCES = (LOSS, f"eval_{ACCURACY}")

    def __init__(self, run: DPORun, *, rows: Sequence[PreferenceRow]) -> None:
        super().__init__(run, rows=rows)
        self.pairs = run

    def _measured(self, samples: Sequence[PairSample]) -> torch.Tensor:
        batch = self.pairs.collate(samples)
        found, _ = self.pairs.preferences(batch)
        loss = found.loss + self.pairs.config.model.nll_loss_coef * found.nll
        values = [loss, *(found.logged[name.removeprefix("eval_")] for name in self.NAMES[1:]), torch.ones_like(loss)]
        return torch.stack(values, dim=-1).double()

    def _metrics(self, sums: torch.Tensor, *, source: str | None) -> dict[str, float]:
        *values, count = sums.tolist()
        means = {name: value / count for name, value in zip(self.NAMES, values, strict=True)} if count else {}
        if source is None:
            return means
        return {f"eval_{source}_{name.removeprefix('eval_')}": means[name] for name in self.OF_SOURCES if means}
