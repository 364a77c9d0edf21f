"""Supervised fine-tuning on conversations, with and without images, and on plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from typing_extensions import Self

from lmm_r1.config import SFTConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.trainer.sft_evaluation import Answers, Evaluation
from lmm_r1.trainer.sft_rows import RowEncoder, evaluation_rows, training_rows
from lmm_r1.trainer.sft_samples import SFTBatch, SFTSample, collate
from lmm_r1.trainer.supervised import Counts, SupervisedRun, Terms, TokenLosses
from lmm_r1.trainer.supervised_models import prepare_policy
from lmm_r1.trainer.supervised_rows import RowCheck
from lmm_r1.trainer.supervised_session import Session

SFTConfigT = TypeVar("SFTConfigT", bound=SFTConfig)


class SFTRun(SupervisedRun[SFTConfigT, Row, SFTSample, SFTBatch]):
    """The loss is the mean over all loss tokens."""

    kind = "sft"
    encoder = RowEncoder
    encode: RowEncoder

    @classmethod
    def read(cls, config: SFTConfigT, check: RowCheck[Row]) -> tuple[KeptRows[Row], KeptRows[Row]]:
        return training_rows(config, check=check), evaluation_rows(config, check=check)

    @classmethod
    def of(cls, session: Session[SFTConfigT], **learned: Any) -> Self:
        return cls(session, prepare_policy(session), **learned)

    def held_out(self, rows: Sequence[Row]) -> Evaluation:
        asked = self.config.eval.verifier is not None
        return Evaluation(
            self.config,
            self.strategy,
            rows=rows,
            encode=self.encode,
            filler=self.filler,
            losses=self.token_losses,
            answers=Answers(self.config, self.engine, checkpoint=self.checkpoint, rows=rows) if asked else None,
        )

    def collate(self, samples: Sequence[SFTSample]) -> SFTBatch:
        """Return samples as one padded batch."""
        return collate(samples, pad_token_id=self.pad_token_id)

    def counts(self, batch: SFTBatch) -> Counts:
        """Return the number of loss tokens."""
        tokens = int(batch.loss_mask.sum())
        return Counts(units=tokens, tokens=tokens)

    def terms(self, batch: SFTBatch) -> Terms:
        """Return the loss of the batch's loss tokens."""
        found = self.token_losses(batch)
        sums = {name: values.detach().sum() for name, values in found.parts.items()}
        return Terms(loss=found.loss.sum(), aux_loss=found.aux_loss, sums=sums)

    def token_losses(self, batch: SFTBatch) -> TokenLosses:
        """Return the negative log-likelihood of each loss token."""
        log_probs, aux_loss = self.policy_log_probs(batch)
        return TokenLosses(loss=-log_probs, aux_loss=aux_loss)
