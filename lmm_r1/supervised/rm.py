"""Training of reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import Self

from lmm_r1.config import RMConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import PreferenceRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.models.loading import trained_settings
from lmm_r1.models.value_model import KitValueModel
from lmm_r1.supervised.held_out import LOSS, RunHeldOut
from lmm_r1.supervised.loop import Counts, SupervisedRun, Terms
from lmm_r1.supervised.models import Session, model_path, prepare_trained
from lmm_r1.supervised.preferences import (
    PairBatch,
    PairSample,
    bradley_terry_loss,
    check_pair,
    collate_pairs,
    encode_pair,
    evaluation_pairs,
    score_loss,
    sides_of,
    training_pairs,
)
from lmm_r1.supervised.rows import RowCheck, SampleEncoder, passes
from lmm_r1.supervised.samples import SFTSample


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    pair: PairSample
    margin: float
    scores: tuple[float, float]
    """Of the chosen and of the rejected response; of use where the row gives them."""

    @property
    def filler(self) -> RewardSample:
        """A sample that teaches nothing."""
        return replace(self, pair=self.pair.filler)


@dataclass(frozen=True, kw_only=True)
class RewardBatch:
    pairs: PairBatch
    margins: torch.Tensor  # (B,)
    scores: torch.Tensor  # (2, B)

    @property
    def prompt_lengths(self) -> torch.Tensor:
        """How many tokens stand before the response of each of the 2 B conversations; of a filler all, (2 B,)."""
        mask = self.pairs.tokens.loss_mask
        whole = self.pairs.tokens.attention_mask.sum(-1)
        return torch.where(mask.any(-1), mask.long().argmax(-1) + 1, whole)


class RewardEncoder(SampleEncoder):
    """Makes samples of pairs."""

    def check(self, row: PreferenceRow) -> None:
        check_pair(row, kit=self.kit, processor=self.processor)

    def __call__(self, row: PreferenceRow) -> RewardSample | None:
        """Return the row's sample, None where it is too long; raises UserError for media that cannot be taken."""
        pair = encode_pair(row, kit=self.kit, processor=self.processor, max_len=self.max_len)
        if pair is None:
            return None
        return RewardSample(
            pair=PairSample(chosen=_to_end(pair.chosen), rejected=_to_end(pair.rejected)),
            margin=row.margin or 0.0,
            scores=(row.chosen_score or 0.0, row.rejected_score or 0.0),
        )


def collate_rewards(samples: Sequence[RewardSample], *, pad_token_id: int) -> RewardBatch:
    """Pad pairs on the right into one batch."""
    return RewardBatch(
        pairs=collate_pairs([sample.pair for sample in samples], pad_token_id=pad_token_id),
        margins=torch.tensor([sample.margin for sample in samples]),
        scores=torch.tensor([sample.scores for sample in samples]).T,
    )


def reward_rows(
    config: RMConfig, *, check: RowCheck[PreferenceRow] = passes
) -> tuple[KeptRows[PreferenceRow], KeptRows[PreferenceRow]]:
    """Return the pairs to learn from and the held-out ones; raises UserError where they lack what the loss needs."""

    def check_row(row: PreferenceRow) -> None:
        if config.model.loss_type == "regression":
            _check_scores(row)
        check(row)

    rows, held_out = training_pairs(config, check=check_row), evaluation_pairs(config, check=check_row)
    if config.model.margin_loss_enable and not any(row.margin for row in rows):
        raise UserError(
            f"--model.margin_loss_enable: no row of --data.dataset {config.data.dataset} has a margin; leave the flag out"
        )
    return rows, held_out


def _check_scores(row: PreferenceRow) -> None:
    if row.chosen_score is None or row.rejected_score is None:
        raise UserError(
            f"{row.location}: --model.loss_type regression needs the scores of both responses, in the columns "
            "chosen_score and rejected_score; add them, or take --model.loss_type sigmoid"
        )


def _to_end(sample: SFTSample) -> SFTSample:
    """Return a sample up to its last loss token, the end token, at which responses are scored when the model is served."""
    end = len(sample.loss_mask) - sample.loss_mask[::-1].index(True)
    return replace(sample, token_ids=sample.token_ids[:end], loss_mask=sample.loss_mask[:end])


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
            trained_settings(config, share_prefix=config.train.shared_prefix_enable),
            value_head_prefix=config.ds.value_head_prefix,
            ds_config=session.strategy.get_ds_train_config(),
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
