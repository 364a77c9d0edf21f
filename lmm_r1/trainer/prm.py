"""Training of a process reward model: behind each step of a solution it predicts whether the step is right."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from lmm_r1.config import PRMConfig
from lmm_r1.data.preferences import StepRow
from lmm_r1.lmm_kits.step_tokens import CONFIG_KEY, StepTokens
from lmm_r1.models.actor import KitActor
from lmm_r1.trainer.held_out import LOSS, RunHeldOut
from lmm_r1.trainer.prm_rows import (
    StepBatch,
    StepEncoder,
    StepSample,
    collate_steps,
    evaluation_steps,
    solutions_of,
    training_steps,
)
from lmm_r1.trainer.strategy import KitStrategy
from lmm_r1.trainer.supervised import Counts, SupervisedRun, Terms
from lmm_r1.trainer.supervised_rows import first_fitting
from lmm_r1.trainer.supervised_start import (
    check_rows,
    model_path,
    opened,
    prepare_trained,
    session,
    trained_settings,
)

ACCURACY, SCORE = "step_accuracy", "step_score"


def train(config: PRMConfig) -> None:
    """Train on `--data.dataset` and write the model to `--ckpt.output_dir`; raises UserError for what the user gave."""
    checkpoint = opened(config)
    rows, held_out = training_steps(config), evaluation_steps(config)
    shown = solutions_of(rows)
    check_rows(config, checkpoint, shown + solutions_of(held_out))
    encode = StepEncoder.of(config, kit=checkpoint.kit, processor=checkpoint.processor)
    filler = first_fitting(config, rows, encode).filler
    models: dict[str, str | None] = {"model.model_name_or_path": checkpoint.path}
    with session(config, checkpoint, kind="prm", models=models, rows=rows, shown=shown) as begun:
        actor = prepare_model(config, begun.args, begun.strategy, steps=begun.steps, tokens=encode.tokens)
        run = begun.made(PRMRun, actor, rows=rows, encode=encode, filler=filler)
        if held_out:
            run.evaluate_on(held_out)
        begun.train(run)


def prepare_model(
    config: PRMConfig, args: SimpleNamespace, strategy: KitStrategy, *, steps: int, tokens: StepTokens
) -> KitActor:
    """Return the model that is trained, under DeepSpeed; whatever is saved of it says by which tokens it judges."""
    actor = KitActor(model_path(config), **trained_settings(config, strategy))
    setattr(actor.model_config, CONFIG_KEY, tokens.in_config)
    return prepare_trained(actor, config, args, strategy, steps=steps)


def step_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of labels p and the two judging tokens: -p log s(d) - (1 - p) log s(-d), the sigmoid s.

    Math-Shepherd, equation 5 of https://arxiv.org/abs/2312.08935, also for labels between 0 and 1.

    Args:
        logits: of the token of a right step and of that of a wrong one, (..., 2); d is the first less the second.
        labels: how right each step is, (...).
    """
    difference = logits[..., 0] - logits[..., 1]
    return -labels * F.logsigmoid(difference) - (1 - labels) * F.logsigmoid(-difference)


class PRMRun(SupervisedRun[StepRow, StepSample, StepBatch]):
    """The loss is the mean over steps."""

    config: PRMConfig
    actor: KitActor
    encode: StepEncoder
    shown = (ACCURACY,)

    def evaluate_on(self, rows: Sequence[StepRow]) -> None:
        """Evaluate the run on held-out rows, by `--eval.*`, and keep its best checkpoint."""
        self.evaluation = StepEvaluation(self, rows=rows)
        self.best.resume()

    def collate(self, samples: Sequence[StepSample]) -> StepBatch:
        """Return samples as one padded batch."""
        return collate_steps(samples, pad_token_id=self.pad_token_id)

    def counts(self, batch: StepBatch) -> Counts:
        """Return the number of steps, which are tokens of the loss."""
        steps = int(batch.tokens.loss_mask.sum())
        return Counts(units=steps, tokens=steps)

    def terms(self, batch: StepBatch) -> Terms:
        """Return the loss of the batch's steps."""
        judged, aux_loss = self.judged(batch)
        sums = judged.sum((0, 1))
        names = (ACCURACY, SCORE)
        logged = dict(zip(names, sums[1:].detach().unbind(), strict=True))
        return Terms(loss=sums[0], aux_loss=aux_loss, sums=logged)

    def judged(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return of each step its loss, whether it is judged as its label says, and its score, (B, T - 1, 3), 0 elsewhere.

        And the load-balancing loss of experts. Every rank calls it equally often.
        """
        device = torch.cuda.current_device()
        tokens = batch.tokens
        wanted = tokens.loss_mask.to(device)
        logits, aux_loss = self.actor.token_logits(
            tokens.sequences.to(device),
            wanted,
            torch.tensor(self.encode.tokens.judging_ids, device=device),
            attention_mask=tokens.attention_mask.to(device),
            ring_attn_group=self.strategy.ring_attn_group,
            media=tokens.media,
        )
        labels = batch.labels.to(logits)
        scores = (logits[..., 0] - logits[..., 1]).detach().sigmoid()
        correct = (scores >= 0.5) == (labels >= 0.5)
        values = torch.stack([step_losses(logits, labels), correct.to(logits), scores], dim=-1)
        return torch.where(wanted[..., None], values, 0.0), aux_loss


class StepEvaluation(RunHeldOut[StepRow, StepSample]):
    """The means over the steps of all held-out rows, and of each data source where there are several."""

    def __init__(self, run: PRMRun, *, rows: Sequence[StepRow]) -> None:
        super().__init__(run, rows=rows)
        self.steps = run

    def _measured(self, samples: Sequence[StepSample]) -> torch.Tensor:
        batch = self.steps.collate(samples)
        judged, _ = self.steps.judged(batch)
        counts = batch.tokens.loss_mask.sum(-1, keepdim=True).to(judged)
        return torch.cat([judged.sum(1), counts], dim=-1).double()

    def _metrics(self, sums: torch.Tensor, *, source: str | None) -> dict[str, float]:
        loss, correct, score, count = sums.tolist()
        if not count:
            return {}
        if source is not None:
            return {f"eval_{source}_loss": loss / count, f"eval_{source}_{ACCURACY}": correct / count}
        return {LOSS: loss / count, f"eval_{ACCURACY}": correct / count, f"eval_{SCORE}": score / count}
