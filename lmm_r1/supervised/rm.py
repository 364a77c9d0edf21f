"""Training of reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lmm_r1.config import RMConfig
from lmm_r1.data.messages import PreferenceRow, Row
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.models.actor import KitValueModel
from lmm_r1.models.loading import trained_settings
from lmm_r1.supervised import RowCheck, judged_rows
from lmm_r1.supervised.dpo import ACCURACY, MARGIN, PairBatch, PairEncoder, PairSample, sides_for_model, sides_of
from lmm_r1.supervised.loop import LOSS, HeldOut, SupervisedRun
from lmm_r1.supervised.samples import SFTSample
from lmm_r1.supervised.start import model_path, prepare_trained
from lmm_r1.train.start import Frame
from lmm_r1.train.update import Counts, Terms

if TYPE_CHECKING:
    from typing_extensions import Self


def bradley_terry_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, margin: torch.Tensor | None) -> torch.Tensor:
    """Return -log s(chosen - rejected - margin) of rewards, with the sigmoid s.

    Equation 1 of https://arxiv.org/abs/2203.02155 (InstructGPT), after Bradley and Terry (1952); with a margin equation 2
    of https://arxiv.org/abs/2307.09288, section 3.2.2.
    """
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)


def score_loss(chosen: torch.Tensor, rejected: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the mean over both responses of (reward - score)^2.

    Args:
        scores: of the chosen responses and of the rejected ones, (2, B).
    """
    return (torch.stack([chosen, rejected]) - scores).square().mean(0)


@dataclass(frozen=True, kw_only=True)
class RewardSample(PairSample):
    margin: float
    scores: tuple[float, float]
    """Of the chosen and of the rejected response; unused if the row has none."""


@dataclass(frozen=True, kw_only=True)
class RewardBatch(PairBatch):
    margins: torch.Tensor  # (B,)
    scores: torch.Tensor  # (2, B)


class RewardEncoder(PairEncoder):
    """Encodes pairs with their margins and scores."""

    def __call__(self, row: PreferenceRow) -> RewardSample | None:
        pair = super().__call__(row)
        if pair is None:
            return None
        return RewardSample(
            chosen=_to_end(pair.chosen),
            rejected=_to_end(pair.rejected),
            margin=row.margin or 0.0,
            scores=(row.chosen_score or 0.0, row.rejected_score or 0.0),
        )


def _to_end(sample: SFTSample) -> SFTSample:
    """Return a sample up to its end token, at which a served model scores responses."""
    end = len(sample.loss_mask) - sample.loss_mask[::-1].index(True)
    return replace(sample, token_ids=sample.token_ids[:end], loss_mask=sample.loss_mask[:end])


# Bins of the confidence with which a pair is ranked, from 0.5 to 1.
BINS = 10


class RewardEvaluation(HeldOut["RMRun", RewardSample]):
    """The means over all held-out pairs, and the calibration of the model's rankings."""

    of_sources = (LOSS, ACCURACY)

    def _measured(self, samples: Sequence[RewardSample]) -> torch.Tensor:
        batch = self.run.collate(samples)
        chosen, rejected = (rewards.double() for rewards in self.run.rewards(batch))
        margin = chosen - rejected
        correct = (margin > 0).to(margin)
        values = [
            self.run.losses(batch, chosen, rejected),
            correct,
            margin,
            chosen + rejected,
            chosen.square() + rejected.square(),
            torch.ones_like(margin),
        ]
        # The model's confidence in its ranking, right or wrong, is at least 0.5.
        confidence = margin.abs().sigmoid()
        places = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
        chosen_bin = F.one_hot(places, BINS).to(margin)  # (B, BINS)
        binned = torch.cat([chosen_bin * confidence[:, None], chosen_bin * correct[:, None]], dim=-1)
        return torch.cat([torch.stack(values, dim=-1), binned], dim=-1)

    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        loss, correct, margin, total, squares, count = sums[:6].tolist()
        if not count:
            return {}
        mean = total / (2 * count)
        confidence, right = sums[6:].chunk(2)
        return {
            LOSS: loss / count,
            ACCURACY: correct / count,
            MARGIN: margin / count,
            "reward_mean": mean,
            "reward_std": max(0.0, squares / (2 * count) - mean**2) ** 0.5,
            "calibration_error": float((confidence - right).abs().sum()) / count,
        }


class RMRun(SupervisedRun[RMConfig, PreferenceRow, RewardSample, RewardBatch]):
    """The loss is the mean over pairs."""

    kind = "rm"
    shown = (ACCURACY, MARGIN)
    encoder = RewardEncoder
    evaluator = RewardEvaluation

    @classmethod
    def load(
        cls, config: RMConfig, path: str, *, split: str, check: RowCheck[PreferenceRow]
    ) -> KeptRows[PreferenceRow]:
        def check_row(row: PreferenceRow) -> PreferenceRow:
            if config.model.loss_type == "regression" and None in (row.chosen_score, row.rejected_score):
                raise UserError(
                    f"{row.location}: --model.loss_type regression needs the scores of both responses, in the columns "
                    "chosen_score and rejected_score; add them, or take --model.loss_type sigmoid"
                )
            return check(row)

        return judged_rows(config, path, split=split, check=check_row)

    @classmethod
    def conversations(cls, rows: Sequence[PreferenceRow]) -> list[Row]:
        return sides_of(rows)

    @classmethod
    def of(cls, session: Frame[RMConfig], **learned: Any) -> Self:
        """Return the run of a session, with the value head of the checkpoint if it has one."""
        config = session.config
        model = KitValueModel(
            model_path(config),
            "critic",
            trained_settings(config, share_prefix=config.train.shared_prefix_enable),
            value_head_prefix=config.ds.value_head_prefix,
            ds_config=session.strategy.get_ds_train_config(),
        )
        return cls(session, prepare_trained(session, model), **learned)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, which wraps all of a value model."""
        return self.actor

    def finish(self) -> None:
        """Write the mean and deviation of held-out rewards to the model's config; its users may normalize with them."""
        if self.evaluation is None:
            return
        # A run that was stopped between its last evaluation and its end has no metrics yet.
        metrics = self.evaluation.last or self.evaluation.evaluate(self.actor)
        config = self.engine.module.model.config
        config.mean, config.std = metrics["eval_reward_mean"], max(metrics["eval_reward_std"], 1e-8)

    def collate(self, samples: Sequence[RewardSample]) -> RewardBatch:
        return RewardBatch(
            sides=sides_for_model(samples),
            margins=torch.tensor([sample.margin for sample in samples]),
            scores=torch.tensor([sample.scores for sample in samples]).T,
        )

    def counts(self, batch: RewardBatch) -> Counts:
        return batch.counts

    def terms(self, batch: RewardBatch) -> Terms:
        chosen, rejected = self.rewards(batch)
        weights = batch.weights.to(chosen)
        logged = {
            ACCURACY: (chosen > rejected).to(chosen),
            MARGIN: chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        sums = {name: (value.detach() * weights).sum() for name, value in logged.items()}
        return Terms(loss=(self.losses(batch, chosen, rejected) * weights).sum(), sums=sums)

    def rewards(self, batch: RewardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards of chosen and of rejected responses, (B,) each; every rank calls it equally often."""
        rewards = self.engine(batch.sides, of_samples=True, ring_attn_group=self.strategy.ring_attn_group)
        chosen, rejected = rewards.chunk(2)
        return chosen, rejected

    def losses(self, batch: RewardBatch, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, (B,)."""
        if self.config.model.loss_type == "regression":
            return score_loss(chosen, rejected, batch.scores.to(chosen))
        margin = batch.margins.to(chosen) if self.config.model.margin_loss_enable else None
        return bradley_terry_loss(chosen, rejected, margin=margin)
