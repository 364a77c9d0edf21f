"""Distillation: a student learns a teacher's distributions over the tokens of responses, beside the responses themselves."""

from __future__ import annotations

from typing import Any

import torch

from lmm_r1.config import KDConfig
from lmm_r1.models.distillation import Distillation
from lmm_r1.models.divergences import Divergence
from lmm_r1.trainer.sft import SFTRun, prepare_actor
from lmm_r1.trainer.sft_rows import RowEncoder, evaluation_rows, training_rows
from lmm_r1.trainer.sft_samples import SFTBatch
from lmm_r1.trainer.supervised import TokenLosses
from lmm_r1.trainer.supervised_rows import first_fitting
from lmm_r1.trainer.supervised_start import check_rows, opened, session
from lmm_r1.trainer.teacher import Teacher, check_teacher, teacher_path

DISTANCE, NLL = "kd_loss", "nll_loss"


def train(config: KDConfig) -> None:
    """Train on `--data.dataset` and write the student to `--ckpt.output_dir`; raises UserError for what the user gave."""
    checkpoint = opened(config)
    rows, eval_rows = training_rows(config), evaluation_rows(config)
    check_rows(config, checkpoint, rows + eval_rows)
    check_teacher(config, checkpoint, rows + eval_rows)
    fitting = first_fitting(config, rows, RowEncoder.of(config, kit=checkpoint.kit, processor=checkpoint.processor))
    models = {"model.model_name_or_path": checkpoint.path, "teacher.model_name_or_path": teacher_path(config)}
    with session(config, checkpoint, kind="kd", models=models, rows=rows, shown=rows) as begun:
        student = prepare_actor(config, begun.args, begun.strategy, steps=begun.steps)
        teacher = Teacher.prepared(config, begun.strategy)
        run = KDRun.of(begun, config, student, rows=rows, fitting=fitting, teacher=teacher)
        if eval_rows:
            run.evaluate_on(eval_rows, checkpoint=checkpoint)
        begun.train(run)


class KDRun(SFTRun):
    """The loss is the mean over all loss tokens of c times the distance and 1 - c times the cross-entropy."""

    config: KDConfig
    shown = (DISTANCE,)

    def __init__(self, *given: Any, teacher: Teacher, **named: Any) -> None:
        """Args: given, named: those of `SFTRun`."""
        super().__init__(*given, **named)
        self.teacher = teacher

    @property
    def divergence(self) -> Divergence:
        """The distance that is made small."""
        model = self.config.model
        return Divergence(name=model.kd_loss, beta=model.kd_beta, temperature=model.kd_temperature)

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
