"""Distillation: a student learns a teacher's distributions over the tokens of responses, beside the responses themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Self

from lmm_r1.config import KDConfig
from lmm_r1.data.messages import Row
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.distillation import Distillation
from lmm_r1.models.divergences import Divergence
from lmm_r1.trainer.sft import SFTRun
from lmm_r1.trainer.sft_samples import SFTBatch
from lmm_r1.trainer.student_engine import StudentEngine, check_sampled
from lmm_r1.trainer.supervised import Terms, TokenLosses
from lmm_r1.trainer.supervised_models import prepare_policy
from lmm_r1.trainer.supervised_session import Session
from lmm_r1.trainer.teacher import Teacher, check_teacher, teacher_path

DISTANCE, NLL, ON_POLICY = "kd_loss", "nll_loss", "on_policy"


class KDRun(SFTRun[KDConfig]):
    """The loss is the mean over all loss tokens of c times the distance and 1 - c times the cross-entropy."""

    kind = "kd"
    shown = (DISTANCE,)

    def __init__(
        self, *given: Any, teacher: Teacher, student_engine: StudentEngine | None = None, **learned: Any
    ) -> None:
        """Args:
        student_engine: samples the student's own responses.
        given, learned: those of `SFTRun`.
        """
        super().__init__(*given, **learned)
        self.teacher = teacher
        self.student_engine = student_engine
        # Whether the update's responses are the student's own.
        self.on_policy = False

    @classmethod
    def models(cls, config: KDConfig) -> dict[str, str | None]:
        return {**super().models(config), "teacher.model_name_or_path": teacher_path(config)}

    @classmethod
    def check(cls, config: KDConfig, checkpoint: Checkpoint, rows: Sequence[Row]) -> None:
        check_teacher(config, checkpoint, rows)
        if config.rollout.on_policy_share:
            check_sampled(config, checkpoint)

    @classmethod
    def of(cls, session: Session[KDConfig], **learned: Any) -> Self:
        student, config = prepare_policy(session), session.config
        teacher = Teacher.prepared(config, session.strategy)
        engine = StudentEngine(config, session.checkpoint, learned["rows"]) if config.rollout.on_policy_share else None
        return cls(session, student, teacher=teacher, student_engine=engine, **learned)

    @property
    def divergence(self) -> Divergence:
        """The distance that is made small."""
        model = self.config.model
        return Divergence(name=model.kd_loss, beta=model.kd_beta, temperature=model.kd_temperature)

    def _micro_batches(self, step: int) -> list[SFTBatch]:
        share = self.config.rollout.on_policy_share
        # The same on every rank, and in a resumed run.
        self.on_policy = random.Random(f"{self.config.train.seed} {step}").random() < share
        if not self.on_policy:
            return super()._micro_batches(step)
        assert self.student_engine is not None, "made where there is a share"
        self.student_engine.renew(self.actor)
        numbers = self._own_indices(step)
        rows = [self.rows[number] for number in numbers]
        return self._in_passes(self.student_engine.samples(rows, step=step, numbers=numbers))

    def terms(self, batch: SFTBatch) -> Terms:
        """Return the mixed loss; of the student's own responses, which nobody wants it to repeat, the distance alone."""
        if not self.on_policy:
            return super().terms(batch)
        found = self.token_losses(batch)
        sums = {name: values.detach().sum() for name, values in found.parts.items()}
        loss = self.config.model.kd_coef * found.parts[DISTANCE].sum()
        return Terms(loss=loss, aux_loss=found.aux_loss, sums={**sums, ON_POLICY: batch.loss_mask.sum().to(loss)})

    def token_losses(self, batch: SFTBatch) -> TokenLosses:
        """Return the loss of each loss token, and the two parts that it is mixed of."""
        device = torch.cuda.current_device()
        log_probs, output = self.actor(
            batch.sequences.to(device),
            batch.loss_mask.to(device),
            attention_mask=batch.attention_mask.to(device),
            return_output=True,
            ring_attn_group=self.strategy.ring_attn_group,
            media=batch.media,
            distillation=Distillation(teacher=self.teacher.tokens(batch), divergence=self.divergence),
        )
        coef, distance = self.config.model.kd_coef, output.divergence
        return TokenLosses(
            loss=coef * distance - (1 - coef) * log_probs,
            parts={DISTANCE: distance, NLL: -log_probs},
            aux_loss=output.aux_loss if self.config.model.aux_loss_coef > 0 else 0.0,
        )
