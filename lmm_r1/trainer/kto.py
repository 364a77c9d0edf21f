"""Kahneman-Tversky optimization: the policy learns from single responses, each of them desirable or undesirable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from lmm_r1.config import KTOConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import UnpairedRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.models.actor import KitActor
from lmm_r1.trainer.held_out import LOSS, RunHeldOut
from lmm_r1.trainer.kto_rows import (
    NeighbourRows,
    Neighbours,
    UnpairedBatch,
    UnpairedEncoder,
    UnpairedSample,
    collate_unpaired,
    conversations_of,
    evaluation_rows,
    shifted,
    training_rows,
)
from lmm_r1.trainer.preference_losses import kto_loss
from lmm_r1.trainer.reference import Reference, ReferredRun
from lmm_r1.trainer.supervised import Counts, Terms
from lmm_r1.trainer.supervised_rows import RowCheck

ACCURACY, KL, MARGIN = "accuracy", "kl", "reward_margin"
KINDS = ("desirable", "undesirable")


class KTORun(ReferredRun[KTOConfig, Neighbours, UnpairedSample, UnpairedBatch]):
    """The loss is the mean over rows; the KL is estimated over the rows of an update, however they are spread."""

    kind = "kto"
    shown = (KL, ACCURACY)
    encoder = UnpairedEncoder
    actor: KitActor
    reference: Reference

    def __init__(self, *given: Any, **learned: Any) -> None:
        """Args:
        given, learned: those of `ReferredRun`.
        """
        super().__init__(*given, **learned)
        # Of the update, or the evaluation, that is being made.
        self.kl = torch.zeros(())
        self.numbers = dict.fromkeys(KINDS, 0.0)

    @classmethod
    def read(
        cls, config: KTOConfig, check: RowCheck[UnpairedRow]
    ) -> tuple[KeptRows[UnpairedRow], KeptRows[UnpairedRow]]:
        return training_rows(config, check=check), evaluation_rows(config, check=check)

    @classmethod
    def conversations(cls, rows: Sequence[UnpairedRow]) -> list[Row]:
        return conversations_of(rows)

    @classmethod
    def learned(cls, rows: Sequence[UnpairedRow]) -> NeighbourRows:
        return NeighbourRows(rows)

    def held_out(self, rows: Sequence[UnpairedRow]) -> UnpairedEvaluation:
        return UnpairedEvaluation(self, rows=list(self.learned(rows)))

    def indices(self, step: int) -> list[Any]:
        """Return the rows of an update, each with the one after it in the batch and the last with the first."""
        return shifted(super().indices(step))

    def collate(self, samples: Sequence[UnpairedSample]) -> UnpairedBatch:
        """Return samples as one padded batch."""
        return collate_unpaired(samples, pad_token_id=self.pad_token_id)

    def counts(self, batch: UnpairedBatch) -> Counts:
        """Return the number of rows, and of the tokens of their own responses."""
        return Counts(units=int(batch.weights[0].sum()), tokens=int(batch.matched.loss_mask.sum()))

    @torch.no_grad()
    def prepared(self, batches: Sequence[UnpairedBatch]) -> Sequence[UnpairedBatch]:
        """Return the batches with the reference's log-probs, once the KL of all ranks' rows is estimated.

        The reference computes what a row's two conversations have in common once.
        """
        known = [replace(batch, reference=self.reference.log_probs(batch.both).sum(-1)) for batch in batches]
        self.actor.eval()
        try:
            sums = torch.cat([self.mismatched(batch) for batch in known]).sum(0)
        finally:
            self.actor.train()
        numbers = [
            sum(float((batch.weights[0] * (batch.desirable == wanted)).sum()) for batch in batches)
            for wanted in (True, False)
        ]
        totals = torch.cat([sums, sums.new_tensor(numbers)])
        dist.all_reduce(totals, group=self.strategy.ds_device_mesh["dp"].get_group())
        self.estimate(totals[:2])
        self.numbers = dict(zip(KINDS, totals[2:].tolist(), strict=True))
        return known

    def mismatched(self, batch: UnpairedBatch) -> torch.Tensor:
        """Return the log-ratio of each mismatched response, and whether it counts, (B, 2) in double precision."""
        ratios = self._ratios(batch, side=1)[0]
        weights = batch.weights[1].to(ratios)
        return torch.stack([ratios * weights, weights], dim=-1).double()

    def estimate(self, sums: torch.Tensor) -> None:
        """Take the mean of mismatched log-ratios (their sum and number over all ranks), 0 at least, for the KL."""
        self.kl = (sums[0] / sums[1].clamp(min=1)).clamp(min=0).float()

    def terms(self, batch: UnpairedBatch) -> Terms:
        """Return the loss of the batch's rows by the KL of the update."""
        loss, logged, aux_loss = self.losses(batch)
        weights = batch.weights[0].to(loss)
        sums = {name: (logged[name] * weights).sum() for name in (ACCURACY, "logits")}
        total = sum(self.numbers.values())
        for kind, of_kind in zip(KINDS, (batch.desirable, ~batch.desirable), strict=True):
            if not self.numbers[kind]:
                # An update without such rows says nothing of them.
                continue
            # The loop divides by the number of all rows.
            share = weights * of_kind.to(weights) * (total / self.numbers[kind])
            sums |= {f"{kind}_{name}": (logged[name] * share).sum() for name in ("reward", "log_prob")}
        if all(self.numbers.values()):
            sums[MARGIN] = sums["desirable_reward"] - sums["undesirable_reward"]
        # The same on every rank and for every row.
        sums[KL] = self.kl.to(weights) * weights.sum()
        return Terms(loss=(loss * weights).sum(), aux_loss=aux_loss, sums=sums)

    def losses(self, batch: UnpairedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | float]:
        """Return each row's loss, what else is known of it, (B,) each, and the load-balancing loss of experts."""
        model = self.config.model
        ratios, log_probs, aux_loss = self._ratios(batch, side=0)
        desirable = batch.desirable.to(ratios.device)
        kl = self.kl.to(ratios)
        loss = kto_loss(
            ratios,
            desirable,
            kl=kl,
            beta=model.beta,
            desirable_weight=model.desirable_loss_weight,
            undesirable_weight=model.undesirable_loss_weight,
        )
        with torch.no_grad():
            # Above 0 where the response is on the right side of the KL.
            logits = model.beta * torch.where(desirable, ratios - kl, kl - ratios)
            logged = {
                ACCURACY: (logits > 0).to(logits),
                "logits": logits,
                "reward": model.beta * ratios.detach(),
                "log_prob": log_probs.detach(),
            }
        return loss, logged, aux_loss

    def _ratios(self, batch: UnpairedBatch, *, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
        """Return log-ratios and the policy's log-probs of responses, (B,) each, and the load-balancing loss of experts.

        Args:
            side: 0 for the rows' own responses, 1 for the mismatched ones.
        """
        tokens = (batch.matched, batch.mismatched)[side]
        if batch.reference is None:
            reference = self.reference.log_probs(tokens).sum(-1)
        else:
            reference = batch.reference.chunk(2)[side]
        policy, aux_loss = self.policy_log_probs(tokens)
        log_probs = policy.sum(-1)
        return log_probs - reference.to(log_probs), log_probs, aux_loss


class UnpairedEvaluation(RunHeldOut[Neighbours, UnpairedSample]):
    """The means over all held-out rows, by the KL that is estimated over all of them."""

    def __init__(self, run: KTORun, *, rows: Sequence[Neighbours]) -> None:
        super().__init__(run, rows=rows, source_of=attrgetter("row.datasource"))
        self.unpaired = run
        self._estimates = False

    def _sums(self) -> torch.Tensor:
        """Go over the rows twice: every loss needs the KL of all of them."""
        self._estimates = True
        sums = super()._sums()
        self.unpaired.estimate(sums[:, :2].sum(0))
        self._estimates = False
        return super()._sums()

    def _measured(self, samples: Sequence[UnpairedSample]) -> torch.Tensor:
        batch = self.unpaired.collate(samples)
        if self._estimates:
            return self.unpaired.mismatched(batch)
        loss, logged, _ = self.unpaired.losses(batch)
        desirable = batch.desirable.to(loss)
        rewards = logged["reward"]
        values = [loss, logged[ACCURACY], rewards * desirable, desirable, rewards * (1 - desirable), 1 - desirable]
        return torch.stack(values, dim=-1).double()

    def _metrics(self, sums: torch.Tensor, *, source: str | None) -> dict[str, float]:
        loss, correct, good, num_good, bad, num_bad = sums.tolist()
        count = num_good + num_bad
        if not count:
            return {}
        if source is not None:
            return {f"eval_{source}_loss": loss / count, f"eval_{source}_{ACCURACY}": correct / count}
        metrics = {LOSS: loss / count, f"eval_{ACCURACY}": correct / count, f"eval_{KL}": self.unpaired.kl.item()}
        if num_good:
            metrics["eval_desirable_reward"] = good / num_good
        if num_bad:
            metrics["eval_undesirable_reward"] = bad / num_bad
        if num_good and num_bad:
            metrics[f"eval_{MARGIN}"] = good / num_good - bad / num_bad
        return metrics
