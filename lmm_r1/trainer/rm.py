"""Training of a reward model: the better one of two responses to a prompt gets the larger reward, or each its score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Self

from lmm_r1.config import RMConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import PreferenceRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.models.value_model import KitValueModel
from lmm_r1.trainer.dpo_rows import sides_of
from lmm_r1.trainer.held_out import LOSS, RunHeldOut
from lmm_r1.trainer.preference_losses import bradley_terry_loss, score_loss
from lmm_r1.trainer.rm_rows import RewardBatch, RewardEncoder, RewardSample, collate_rewards, reward_rows
from lmm_r1.trainer.supervised import Counts, SupervisedRun, Terms
from lmm_r1.trainer.supervised_models import model_path, prepare_trained, trained_settings
from lmm_r1.trainer.supervised_rows import RowCheck
from lmm_r1.trainer.supervised_session import Session

ACCURACY, MARGIN = "pair_accuracy", "reward_margin"
# Bins of the confidence with which a pair is ranked, from 0.5 to 1.
BINS = 10


class RMRun(SupervisedRun[RMConfig, PreferenceRow, RewardSample, RewardBatch]):
    """The loss is the mean over pairs."""

    kind = "rm"
    shown = (ACCURACY, MARGIN)
    encoder = RewardEncoder

    @classmethod
    def read(
        cls, config: RMConfig, check: RowCheck[PreferenceRow]
    ) -> tuple[KeptRows[PreferenceRow], KeptRows[PreferenceRow]]:
        return reward_rows(config, check=check)

    @classmethod
    def conversations(cls, rows: Sequence[PreferenceRow]) -> list[Row]:
        return sides_of(rows)

    @classmethod
    def of(cls, session: Session[RMConfig], **learned: Any) -> Self:
        """Return the run of a session; the reward model's head is the checkpoint's where that has one."""
        config = session.config
        model = KitValueModel(
            model_path(config),
            "critic",
            value_head_prefix=config.ds.value_head_prefix,
            share_prefix=config.train.shared_prefix_enable,
            **trained_settings(config, session.strategy),
        )
        return cls(session, prepare_trained(session, model), **learned)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, which is around all of a value model."""
        return self.actor

    def held_out(self, rows: Sequence[PreferenceRow]) -> RewardEvaluation:
        return RewardEvaluation(self, rows=rows)

    def finish(self) -> None:
        """Note mean and deviation of held-out rewards in the model, by which they may be normalized where it is used."""
        evaluation = self.evaluation
        if evaluation is None:
            return
        assert isinstance(evaluation, RewardEvaluation), "made by evaluate_on"
        if evaluation.spread is None:
            # Of a run that was stopped between its last evaluation and its end.
            evaluation.run(self.actor)
        assert evaluation.spread is not None, "an evaluation finds it out"
        config = self.engine.module.model.config
        config.mean, config.std = evaluation.spread

    def collate(self, samples: Sequence[RewardSample]) -> RewardBatch:
        """Return pairs as one padded batch."""
        return collate_rewards(samples, pad_token_id=self.pad_token_id)

    def counts(self, batch: RewardBatch) -> Counts:
        """Return the number of pairs, and of the tokens of both responses."""
        return Counts(units=int(batch.pairs.weights.sum()), tokens=int(batch.pairs.tokens.loss_mask.sum()))

    def terms(self, batch: RewardBatch) -> Terms:
        """Return the loss of the batch's pairs."""
        chosen, rejected = self.rewards(batch)
        weights = batch.pairs.weights.to(chosen)
        logged = {
            ACCURACY: (chosen > rejected).to(chosen),
            MARGIN: chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        sums = {name: (value.detach() * weights).sum() for name, value in logged.items()}
        return Terms(loss=(self.losses(batch, chosen, rejected) * weights).sum(), sums=sums)

    def rewards(self, batch: RewardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of the chosen and of the rejected responses, (B,) each; every rank calls it equally often."""
        device = torch.cuda.current_device()
        tokens = batch.pairs.tokens
        shares = self.config.train.shared_prefix_enable
        rewards = self.engine(
            tokens.sequences.to(device),
            attention_mask=tokens.attention_mask.to(device),
            ring_attn_group=self.strategy.ring_attn_group,
            media=tokens.media,
            prompt_lengths=batch.prompt_lengths if shares else None,
        )
        chosen, rejected = rewards.chunk(2)
        return chosen, rejected

    def losses(self, batch: RewardBatch, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, (B,), as the flags ask for it."""
        if self.config.model.loss_type == "regression":
            return score_loss(chosen, rejected, batch.scores.to(chosen))
        margin = batch.margins.to(chosen) if self.config.model.margin_loss_enable else None
        return bradley_terry_loss(chosen, rejected, margin=margin)


class RewardEvaluation(RunHeldOut[PreferenceRow, RewardSample]):
    """The means over all held-out pairs, and how well the model knows how sure it may be of a ranking."""

    def __init__(self, run: RMRun, *, rows: Sequence[PreferenceRow]) -> None:
        super().__init__(run, rows=rows)
        self.pairs = run
        self.spread: tuple[float, float] | None = None
        """Mean and deviation of the rewards in the last evaluation."""

    def _measured(self, samples: Sequence[RewardSample]) -> torch.Tensor:
        batch = self.pairs.collate(samples)
        chosen, rejected = (rewards.double() for rewards in self.pairs.rewards(batch))
        margin = chosen - rejected
        correct = (margin > 0).to(margin)
        values = [
            self.pairs.losses(batch, chosen, rejected),
            correct,
            margin,
            chosen + rejected,
            chosen.square() + rejected.square(),
            torch.ones_like(margin),
        ]
        # How sure the model is of its ranking, whichever it is: from 0.5 up.
        confidence = margin.abs().sigmoid()
        places = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
        chosen_bin = torch.nn.functional.one_hot(places, BINS).to(margin)  # (B, BINS)
        binned = torch.cat([chosen_bin * confidence[:, None], chosen_bin * correct[:, None]], dim=-1)
        return torch.cat([torch.stack(values, dim=-1), binned], dim=-1)

    def _metrics(self, sums: torch.Tensor, *, source: str | None) -> dict[str, float]:
        loss, correct, margin, total, squares, count = sums[:6].tolist()
        if not count:
            return {}
        if source is not None:
            return {f"eval_{source}_loss": loss / count, f"eval_{source}_{ACCURACY}": correct / count}
        mean = total / (2 * count)
        deviation = max(0.0, squares / (2 * count) - mean**2) ** 0.5
        self.spread = (mean, max(deviation, 1e-8))
        confidence, right = sums[6:].chunk(2)
        return {
            LOSS: loss / count,
            f"eval_{ACCURACY}": correct / count,
            f"eval_{MARGIN}": margin / count,
            "eval_reward_mean": mean,
            "eval_reward_std": deviation,
            "eval_calibration_error": float((confidence - right).abs().sum()) / count,
        }
