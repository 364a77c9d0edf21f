"""Kahneman-Tversky optimization: its loss, rows with their neighbours as samples, and the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lmm_r1.config import KTOConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import PreferenceRow, UnpairedRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.models.actor import KitActor
from lmm_r1.supervised import RowCheck, SampleEncoder, judged_rows
from lmm_r1.supervised.dpo import PairSample, ReferredRun, check_response, collate_pairs, encode_pair
from lmm_r1.supervised.held_out import LOSS, HeldOut
from lmm_r1.supervised.loop import Counts, Terms
from lmm_r1.supervised.models import Reference
from lmm_r1.supervised.samples import SFTBatch


def kto_loss(
    ratios: torch.Tensor,
    desirable: torch.Tensor,
    *,
    kl: torch.Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Return w (1 - s(b (r - kl))) of desirable responses' log-ratios r, and w (1 - s(b (kl - r))) of the others.

    KTO, equation 8 of https://arxiv.org/abs/2402.01306, with the sigmoid s.

    Args:
        desirable: whether each response is to become more likely, bool.
        kl: an estimate of the policy's KL divergence from the reference, not negative, (), treated as a constant.
    """
    logits = beta * (ratios - kl.detach())
    # 1 - s(x) = s(-x), without the loss of digits near 1.
    return torch.where(desirable, desirable_weight * F.sigmoid(-logits), undesirable_weight * F.sigmoid(logits))


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """A row, and the next one, whose response estimates the KL."""

    row: UnpairedRow
    following: UnpairedRow


@dataclass(frozen=True)
class NeighbourRows:
    """Returns the rows at two places, which a run takes from one batch."""

    rows: Sequence[UnpairedRow]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Neighbours]:
        return map(self.__getitem__, shifted(range(len(self.rows))))

    def __getitem__(self, places: tuple[int, int]) -> Neighbours:
        first, second = places
        return Neighbours(row=self.rows[first], following=self.rows[second])


@dataclass(frozen=True, kw_only=True)
class UnpairedSample(PairSample):
    """The row's conversation, called chosen, and its prompt with the following row's response, called rejected."""

    desirable: bool


@dataclass(frozen=True, kw_only=True)
class UnpairedBatch:
    both: SFTBatch
    """2 B conversations: those of the rows, then their prompts with the following rows' responses."""
    desirable: torch.Tensor
    """Bool, (B,)."""
    reference: torch.Tensor | None = None
    """The reference's log-prob of each response, (2 B,), once it is known."""

    @property
    def matched(self) -> SFTBatch:
        """The rows' own conversations."""
        return self._half(slice(0, len(self.desirable)))

    @property
    def mismatched(self) -> SFTBatch:
        """The prompts with the following rows' responses."""
        return self._half(slice(len(self.desirable), None))

    @property
    def weights(self) -> torch.Tensor:
        """Which conversations count, (2, B): 1, or 0 for one that only fills the batch or was too long."""
        return self.both.loss_mask.any(-1).float().view(2, -1)

    def _half(self, rows: slice) -> SFTBatch:
        return SFTBatch(
            sequences=self.both.sequences[rows],
            attention_mask=self.both.attention_mask[rows],
            loss_mask=self.both.loss_mask[rows],
            media=self.both.media[rows],
        )


class UnpairedEncoder(SampleEncoder):
    """Encodes rows with their neighbours."""

    def check(self, row: UnpairedRow) -> None:
        conversation = row.conversation(row.response)
        check_response(conversation, first=len(row.messages), kit=self.kit, processor=self.processor)

    def __call__(self, found: Neighbours) -> UnpairedSample | None:
        """Return the row's sample, None if it is too long; raises UserError for media that cannot be used.

        If only the mismatched conversation is too long, or cannot be encoded, the row takes no part in the estimate of
        the KL.
        """
        row, other = found.row, found.following.response
        try:
            pair = self._pair(row, other)
        except UserError:
            # The row is encoded by itself below, which raises its own errors.
            pair = None
        if pair is None:
            pair = self._pair(row, row.response)
            if pair is None:
                return None
            pair = replace(pair, rejected=pair.rejected.filler)
        return UnpairedSample(chosen=pair.chosen, rejected=pair.rejected, desirable=row.desirable)

    def _pair(self, row: UnpairedRow, other: tuple[Any, ...]) -> PairSample | None:
        sides = PreferenceRow(
            messages=row.messages,
            chosen=row.response,
            rejected=other,
            margin=None,
            location=row.location,
            datasource=row.datasource,
            plain=row.plain,
        )
        return encode_pair(sides, kit=self.kit, processor=self.processor, max_len=self.max_len)


def collate_unpaired(samples: Sequence[UnpairedSample], *, pad_token_id: int) -> UnpairedBatch:
    """Pad samples on the right into one batch."""
    return UnpairedBatch(
        both=collate_pairs(samples, pad_token_id=pad_token_id).tokens,
        desirable=torch.tensor([sample.desirable for sample in samples]),
    )


def shifted(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """`[1, 2, 3]` → `[(1, 2), (2, 3), (3, 1)]`."""
    return list(zip(rows, [*rows[1:], *rows[:1]], strict=True))


ACCURACY, KL, MARGIN = "accuracy", "kl", "reward_margin"
KINDS = ("desirable", "undesirable")


class UnpairedEvaluation(HeldOut["KTORun", UnpairedSample]):
    """The means over all held-out rows, with the KL that is estimated over all of them."""

    of_sources = (LOSS, ACCURACY)
    _estimates = False

    def source_of(self, row: Neighbours) -> str:
        return row.row.datasource

    def _sums(self) -> torch.Tensor:
        # Two passes, because every loss needs the KL of all rows.
        self._estimates = True
        sums = super()._sums()
        self.run.estimate(sums[:, :2].sum(0))
        self._estimates = False
        return super()._sums()

    def _measured(self, samples: Sequence[UnpairedSample]) -> torch.Tensor:
        batch = self.run.collate(samples)
        if self._estimates:
            return self.run.mismatched(batch)
        loss, logged, _ = self.run.losses(batch)
        desirable = batch.desirable.to(loss)
        rewards = logged["reward"]
        values = [loss, logged[ACCURACY], rewards * desirable, desirable, rewards * (1 - desirable), 1 - desirable]
        return torch.stack(values, dim=-1).double()

    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        loss, correct, good, num_good, bad, num_bad = sums.tolist()
        count = num_good + num_bad
        if not count:
            return {}
        metrics = {LOSS: loss / count, ACCURACY: correct / count, KL: self.run.kl.item()}
        if num_good:
            metrics["desirable_reward"] = good / num_good
        if num_bad:
            metrics["undesirable_reward"] = bad / num_bad
        if num_good and num_bad:
            metrics[MARGIN] = good / num_good - bad / num_bad
        return metrics


class KTORun(ReferredRun[KTOConfig, Neighbours, UnpairedSample, UnpairedBatch]):
    """The loss is the mean over rows; the KL is estimated over the rows of an update, however they are spread."""

    kind = "kto"
    shown = (KL, ACCURACY)
    encoder = UnpairedEncoder
    evaluator = UnpairedEvaluation
    actor: KitActor
    reference: Reference

    def __init__(self, *given: Any, **learned: Any) -> None:
        super().__init__(*given, **learned)
        # Estimated for the present update or evaluation.
        self.kl = torch.zeros(())
        self.numbers = dict.fromkeys(KINDS, 0.0)

    @classmethod
    def load(
        cls, config: KTOConfig, path: str, *, split: str, check: RowCheck[UnpairedRow], held_out: bool
    ) -> KeptRows[UnpairedRow]:
        rows = judged_rows(config, path, split=split, check=check)
        if held_out and len(rows) == 1:
            raise UserError(
                f"--eval.dataset {path} has one row; the KL is estimated by the responses to others, so add some"
            )
        return rows

    @classmethod
    def conversations(cls, rows: Sequence[UnpairedRow]) -> list[Row]:
        return [row.conversation(row.response) for row in rows]

    @classmethod
    def learned(cls, rows: Sequence[UnpairedRow]) -> NeighbourRows:
        return NeighbourRows(rows)

    def indices(self, step: int) -> list[Any]:
        """Return the rows of an update, each with the one after it in the batch and the last with the first."""
        found = super().indices(step)
        # The last update may have one row.
        return shifted(found) if len(found) > 1 else [(found[0], (found[0] + 1) % len(self.rows))]

    def collate(self, samples: Sequence[UnpairedSample]) -> UnpairedBatch:
        return collate_unpaired(samples, pad_token_id=self.pad_token_id)

    def counts(self, batch: UnpairedBatch) -> Counts:
        return Counts(units=int(batch.weights[0].sum()), tokens=int(batch.matched.loss_mask.sum()))

    @torch.no_grad()
    def prepared(self, batches: Sequence[UnpairedBatch]) -> Sequence[UnpairedBatch]:
        """Estimate the KL over all ranks' rows, and return the batches with the reference's log-probs.

        The reference computes the common prompt of a row's two conversations once.
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
        """Set the KL to the mean of mismatched log-ratios, at least 0; `sums` are their sum and number over all ranks."""
        self.kl = (sums[0] / sums[1].clamp(min=1)).clamp(min=0).float()

    def terms(self, batch: UnpairedBatch) -> Terms:
        loss, logged, aux_loss = self.losses(batch)
        weights = batch.weights[0].to(loss)
        sums = {name: (logged[name] * weights).sum() for name in (ACCURACY, "logits")}
        total = sum(self.numbers.values())
        for kind, of_kind in zip(KINDS, (batch.desirable, ~batch.desirable), strict=True):
            if not self.numbers[kind]:
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
        """Return each row's loss and logged values, (B,) each, and the load-balancing loss of experts."""
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
            # Positive if the response is on the right side of the KL.
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
