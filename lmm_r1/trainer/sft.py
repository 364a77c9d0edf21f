"""Supervised fine-tuning on conversations, with and without images, and on plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from lmm_r1.config import SFTConfig
from lmm_r1.data.messages import Row
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.actor import KitActor
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Trackers
from lmm_r1.trainer.sft_evaluation import Answers, Evaluation
from lmm_r1.trainer.sft_rows import RowEncoder, evaluation_rows, training_rows
from lmm_r1.trainer.sft_samples import SFTBatch, SFTSample, collate
from lmm_r1.trainer.stopping import StopRequests
from lmm_r1.trainer.strategy import KitStrategy
from lmm_r1.trainer.supervised import Counts, SupervisedRun, Terms, TokenLosses
from lmm_r1.trainer.supervised_rows import first_fitting
from lmm_r1.trainer.supervised_start import (
    Session,
)
from lmm_r1.trainer.supervised_start import _check_processes as _check_processes
from lmm_r1.trainer.supervised_start import check_rows, model_path, opened, prepare_trained, session, trained_settings


def train(config: SFTConfig) -> None:
    """Train on `--data.dataset` and write the model to `--ckpt.output_dir`; raises UserError for what the user gave."""
    checkpoint = opened(config)
    rows, eval_rows = training_rows(config), evaluation_rows(config)
    check_rows(config, checkpoint, rows + eval_rows)
    fitting = first_fitting(config, rows, RowEncoder.of(config, kit=checkpoint.kit, processor=checkpoint.processor))
    models: dict[str, str | None] = {"model.model_name_or_path": checkpoint.path}
    with session(config, checkpoint, kind="sft", models=models, rows=rows, shown=rows) as begun:
        actor = prepare_actor(config, begun.args, begun.strategy, steps=begun.steps)
        run = SFTRun.of(begun, config, actor, rows=rows, fitting=fitting)
        if eval_rows:
            run.evaluate_on(eval_rows, checkpoint=checkpoint)
        begun.train(run)


def prepare_actor(config: SFTConfig, args: SimpleNamespace, strategy: KitStrategy, *, steps: int) -> KitActor:
    """Return the model that is trained, under DeepSpeed."""
    actor = KitActor(model_path(config), **trained_settings(config, strategy))
    return prepare_trained(actor, config, args, strategy, steps=steps)


class SFTRun(SupervisedRun[Row, SFTSample, SFTBatch]):
    """The loss is the mean over all loss tokens."""

    config: SFTConfig
    encode: RowEncoder

    def __init__(
        self,
        config: SFTConfig,
        strategy: KitStrategy,
        actor: KitActor,
        *,
        kit: Any,
        processor: Any,
        rows: list[Row],
        folder: RunFolder,
        fitting: SFTSample,
        stops: StopRequests | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Args: fitting: any sample that is not too long."""
        super().__init__(
            config,
            strategy,
            actor,
            kit=kit,
            processor=processor,
            rows=rows,
            folder=folder,
            encode=RowEncoder.of(config, kit=kit, processor=processor),
            filler=replace(fitting, loss_mask=[False] * len(fitting.loss_mask)),
            stops=stops,
            trackers=trackers,
        )

    @classmethod
    def of(
        cls, begun: Session, config: SFTConfig, actor: KitActor, *, rows: list[Row], fitting: SFTSample, **more: Any
    ) -> SFTRun:
        """Return the run of a session.

        Args:
            more: what a subclass takes beside.
        """
        return cls(
            config,
            begun.strategy,
            actor,
            kit=begun.checkpoint.kit,
            processor=begun.checkpoint.processor,
            rows=rows,
            folder=begun.folder,
            fitting=fitting,
            stops=begun.stops,
            trackers=begun.trackers,
            **more,
        )

    def evaluate_on(self, rows: list[Row], *, checkpoint: Checkpoint) -> None:
        """Evaluate the run on held-out rows, by `--eval.*`, and keep its best checkpoint."""
        asked, model = self.config.eval.verifier is not None, self.actor.model
        self.evaluation = Evaluation(
            self.config,
            self.strategy,
            rows=rows,
            encode=self.encode,
            filler=self.filler,
            losses=self.token_losses,
            answers=Answers(self.config, model, checkpoint=checkpoint, rows=rows) if asked else None,
        )
        self.best.resume()

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
