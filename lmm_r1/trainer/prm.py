"""Training of a process reward model: behind each step of a solution it predicts whether the step is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from typing_extensions import Self

from lmm_r1.config import PRMConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import StepRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.lmm_kits.step_tokens import CONFIG_KEY
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
from lmm_r1.trainer.prompt_groups import grouped_indices, in_turns, prompt_numbers
from lmm_r1.trainer.supervised import Counts, SupervisedRun, Terms
from lmm_r1.trainer.supervised_models import load_policy, prepare_trained
from lmm_r1.trainer.supervised_rows import RowCheck
from lmm_r1.trainer.supervised_session import Session

ACCURACY, SCORE = "step_accuracy", "step_score"


def step_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of labels p and the two judging tokens: -p log s(d) - (1 - p) log s(-d), the sigmoid s.

    Math-Shepherd, equation 5 of https://arxiv.org/abs/2312.08935, also for labels between 0 and 1.

    Args:
        logits: of the token of a right step and of that of a wrong one, (..., 2); d is the first less the second.
        labels: how right each step is, (...).
    """
    difference = logits[..., 0] - logits[..., 1]
    return -labels * F.logsigmoid(difference) - (1 - labels) * F.logsigmoid(-difference)


class PRMRun(SupervisedRun[PRMConfig, StepRow, StepSample, StepBatch]):
    """The loss is the mean over steps."""

    kind = "prm"
    shown = (ACCURACY,)
    encoder = StepEncoder
    actor: KitActor
    encode: StepEncoder

    @classmethod
    def read(cls, config: PRMConfig, check: RowCheck[StepRow]) -> tuple[KeptRows[StepRow], KeptRows[StepRow]]:
        return training_steps(config, check=check), evaluation_steps(config, check=check)

    @classmethod
    def conversations(cls, rows: Sequence[StepRow]) -> list[Row]:
        return solutions_of(rows)

    @classmethod
    def of(cls, session: Session[PRMConfig], **learned: Any) -> Self:
        """Return the run of a session; whatever is saved of its model says by which tokens it judges."""
        config = session.config
        actor = load_policy(session, share_prefix=config.ds.packing_samples and config.train.shared_prefix_enable)
        setattr(actor.model_config, CONFIG_KEY, learned["encode"].tokens.in_config)
        return cls(session, prepare_trained(session, actor), **learned)

    def __init__(self, *given: Any, **learned: Any) -> None:
        """Args:
        given, learned: those of `SupervisedRun`.
        """
        super().__init__(*given, **learned)
        # Of each row, where the rows of a prompt are to stay together.
        self.prompts = prompt_numbers(self.rows) if self.config.train.group_prompts_enable else None

    def indices(self, step: int) -> list[Any]:
        """Return the rows of an update; those of one prompt fall to one rank, one after another, where that is asked for."""
        if self.prompts is None:
            return super().indices(step)
        train = self.config.train
        found = grouped_indices(self.prompts, batch_size=train.batch_size, seed=train.seed, step=step)
        return in_turns(found, ranks=self.strategy.ds_device_mesh["dp"].size())

    def held_out(self, rows: Sequence[StepRow]) -> StepEvaluation:
        return StepEvaluation(self, rows=rows)

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
            prompt_lengths=batch.prompt_lengths if self.config.train.shared_prefix_enable else None,
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
