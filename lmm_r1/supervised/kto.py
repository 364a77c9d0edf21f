"""Kahneman-Tversky optimization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from lmm_r1.config import KTOConfig
from lmm_r1.config.shared import named_reading
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import UNPAIRED, PreferenceRow, UnpairedRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.models.actor import KitActor
from lmm_r1.supervised.held_out import LOSS, RunHeldOut
from lmm_r1.supervised.loop import Counts, Terms
from lmm_r1.supervised.preferences import PairSample, check_response, collate_pairs, encode_pair, kto_loss
from lmm_r1.supervised.reference import Reference, ReferredRun
from lmm_r1.supervised.rows import RowCheck, SampleEncoder, blended_rows, judged_rows, passes
from lmm_r1.supervised.samples import SFTBatch


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """A row, and the one whose response stands in for its own where the KL is estimated."""

    row: UnpairedRow
    following: UnpairedRow


@dataclass(frozen=True)
class NeighbourRows:
    """Gives the rows at two places, as a run takes them from its batches."""

    rows: Sequence[UnpairedRow]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Neighbours]:
        """Give each row with the one after it, and the last with the first."""
        return map(self.__getitem__, shifted(range(len(self.rows))))

    def __getitem__(self, places: tuple[int, int]) -> Neighbours:
        first, second = places
        return Neighbours(row=self.rows[first], following=self.rows[second])


@dataclass(frozen=True, kw_only=True)
class UnpairedSample:
    pair: PairSample
    """The row's conversation, called chosen, and its prompt with the following row's response, called rejected."""
    desirable: bool

    @property
    def filler(self) -> UnpairedSample:
        """A sample that teaches nothing."""
        return replace(self, pair=self.pair.filler)


@dataclass(frozen=True, kw_only=True)
class UnpairedBatch:
    both: SFTBatch
    """Of 2 B conversations: those of the rows, and then their prompts with the following rows' responses."""
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
    """Makes samples of rows and their neighbours."""

    def check(self, row: UnpairedRow) -> None:
        """Raise UserError for a row, without its neighbour, that cannot be encoded."""
        conversation = row.conversation(row.response)
        check_response(conversation, first=len(row.messages), kit=self.kit, processor=self.processor)

    def __call__(self, found: Neighbours) -> UnpairedSample | None:
        """Return the row's sample, None where it is too long; raises UserError for media that cannot be taken.

        Where only the mismatched conversation is too long, or cannot be encoded, the row takes no part in the estimate of
        the KL.
        """
        row, other = found.row, found.following.response
        try:
            pair = self._pair(row, other)
        except UserError:
            # What is wrong with the row itself is told below.
            pair = None
        if pair is None:
            alone = self._pair(row, row.response)
            if alone is None:
                return None
            pair = PairSample(chosen=alone.chosen, rejected=alone.filler.rejected)
        return UnpairedSample(pair=pair, desirable=row.desirable)

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
        both=collate_pairs([sample.pair for sample in samples], pad_token_id=pad_token_id).tokens,
        desirable=torch.tensor([sample.desirable for sample in samples]),
    )


def shifted(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """`[1, 2, 3]` → `[(1, 2), (2, 3), (3, 1)]`."""
    return list(zip(rows, [*rows[1:], *rows[:1]], strict=True))


def training_rows(config: KTOConfig, *, check: RowCheck[UnpairedRow] = passes) -> KeptRows[UnpairedRow]:
    """Return the rows of `--data.dataset`; raises UserError where they cannot be learned from, or are too few."""
    return blended_rows(config, lambda path: _load(config, path, split=config.data.dataset_split, check=check))


def evaluation_rows(config: KTOConfig, *, check: RowCheck[UnpairedRow] = passes) -> KeptRows[UnpairedRow]:
    """Return the rows of `--eval.dataset`, none without; raises UserError for a single one."""
    path = config.eval.dataset
    rows = KeptRows() if path is None else _load(config, path, split=config.eval.split, check=check)
    if len(rows) == 1:
        raise UserError(
            f"--eval.dataset {path} has one row; the KL is estimated by the responses to others, so add some"
        )
    return rows


def conversations_of(rows: Sequence[UnpairedRow]) -> list[Row]:
    """Return the conversations of rows."""
    return [row.conversation(row.response) for row in rows]


def _load(config: KTOConfig, path: str, *, split: str, check: RowCheck[UnpairedRow]) -> KeptRows[UnpairedRow]:
    data = config.data
    reading = named_reading(data, prompt=data.input_key, answer=data.label_key, prefix="--data.")
    # As in OpenRLHF, a column of text that is named goes in as it stands where no chat template is asked for.
    is_plain = data.input_key is not None and not data.apply_chat_template
    reading = replace(
        reading,
        names=replace(reading.names, response=data.output_key),
        plain_template=(data.input_template or "{}") if is_plain else None,
    )
    return judged_rows(path, UNPAIRED, split=split, reading=reading, bad_rows=data.bad_rows, check=check)


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
