"""The rows of a reward model's training: pairs whose responses end where they are scored, with margins or scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lmm_r1.config import RMConfig
from lmm_r1.data.preferences import PreferenceRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.trainer.dpo_rows import evaluation_pairs, training_pairs
from lmm_r1.trainer.preference_samples import PairBatch, PairSample, check_pair, collate_pairs, encode_pair
from lmm_r1.trainer.sft_samples import SFTSample
from lmm_r1.trainer.supervised_rows import RowCheck, SampleEncoder, passes


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
