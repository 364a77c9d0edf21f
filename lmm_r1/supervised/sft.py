"""Supervised fine-tuning: its rows, its evaluation, and the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lmm_r1.config import SFTConfig
from lmm_r1.config.run_rows import read_conversations
from lmm_r1.data.messages import Row, demonstration
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.checkpoint import ImageFitting
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.supervised import RowCheck, SampleEncoder, kept
from lmm_r1.supervised.held_out import LOSS, HeldOut
from lmm_r1.supervised.loop import SupervisedRun, TokenTerms
from lmm_r1.supervised.models import prepare_policy
from lmm_r1.supervised.samples import SFTSample, check_sample, encode_sample, loss_turns
from lmm_r1.train.start import Frame
from lmm_r1.train.update import Counts, Terms

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class RowEncoder(SampleEncoder):
    """Encodes conversations and plain texts."""

    every_turn: bool
    every_token: bool

    @classmethod
    def of(cls, config: SFTConfig, *, kit: LmmKit, processor: Any) -> RowEncoder:
        return cls(
            kit=kit,
            processor=processor,
            max_len=config.data.max_len,
            every_turn=config.data.multiturn,
            every_token=config.model.pretrain_mode_enable,
        )

    def check(self, row: Row, fitting: ImageFitting | None) -> Row:
        outline = check_sample(
            row, kit=self.kit, processor=self.processor, every_turn=self.every_turn, every_token=self.every_token
        )
        return row if fitting is None else fitting.fitted(row, outline)

    def __call__(self, row: Row) -> SFTSample | None:
        return encode_sample(
            row,
            kit=self.kit,
            processor=self.processor,
            max_len=self.max_len,
            every_turn=self.every_turn,
            every_token=self.every_token,
        )


class SFTEvaluation(HeldOut["SFTRun[Any]", SFTSample]):
    """The mean loss per loss token of all ranks' rows."""

    parts: tuple[str, ...] = ()
    """The names of other measured values; known after the first pass."""

    def _measured(self, samples: Sequence[SFTSample]) -> torch.Tensor:
        batch = self.run.collate(samples)
        tokens = torch.stack([sample.loss_mask.sum() for sample in batch])
        found = self.run.token_losses(batch)
        self.parts = tuple(found.parts)
        sums = [values.double().sum(-1) for values in (found.loss, *found.parts.values())]
        return torch.stack([*sums, tokens.to(sums[0])], dim=-1)

    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        *totals, tokens = sums.tolist()
        names = (LOSS, *self.parts)
        return {name: total / tokens for name, total in zip(names, totals, strict=True)} if tokens else {}


SFTConfigT = TypeVar("SFTConfigT", bound=SFTConfig)


class SFTRun(SupervisedRun[SFTConfigT, Row, SFTSample, list[ModelSample]]):
    """The loss is the mean over all loss tokens."""

    kind = "sft"
    encoder = RowEncoder
    evaluator = SFTEvaluation

    @classmethod
    def load(cls, config: SFTConfigT, path: str, *, split: str, check: RowCheck[Row]) -> KeptRows[Row]:
        def check_row(row: Row) -> Row:
            learned = demonstration(row)
            if not config.model.pretrain_mode_enable:
                loss_turns(learned, every_turn=config.data.multiturn)
            return check(learned)

        return kept(read_conversations(config, path, split=split, check=check_row))

    @classmethod
    def of(cls, session: Frame[SFTConfigT], **learned: Any) -> Self:
        return cls(session, prepare_policy(session), **learned)

    def collate(self, samples: Sequence[SFTSample]) -> list[ModelSample]:
        return [sample.for_model() for sample in samples]

    def counts(self, batch: list[ModelSample]) -> Counts:
        tokens = sum(int(sample.loss_mask.sum()) for sample in batch)
        return Counts(units=tokens, tokens=tokens, samples=len(batch))

    def terms(self, batch: list[ModelSample]) -> Terms:
        found = self.token_losses(batch)
        sums = {name: values.detach().sum() for name, values in found.parts.items()}
        return Terms(loss=found.loss.sum(), aux_loss=found.aux_loss, sums=sums)

    def token_losses(self, batch: list[ModelSample]) -> TokenTerms:
        """Return the negative log-likelihood of each loss token."""
        log_probs, aux_loss = self.policy_log_probs(batch)
        return TokenTerms(loss=-log_probs, aux_loss=aux_loss)
