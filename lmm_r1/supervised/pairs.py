"""Training on pairs of responses: DPO and its variants, and reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lmm_r1.config import DPOConfig, RMConfig, model_path
from lmm_r1.config.supervised import DPOModelConfig
from lmm_r1.data.messages import PreferenceRow, Row, images_of
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.checkpoint import ImageFitting, encode_row, outlined_row
from lmm_r1.lmm_kits.encoding import placed
from lmm_r1.models.actor import KitValueModel
from lmm_r1.models.loading import trained_settings
from lmm_r1.models.packed.packing import ModelSample, stacked
from lmm_r1.supervised import RowCheck, SampleEncoder, judged_rows
from lmm_r1.supervised.loop import LOSS, HeldOut, SupervisedRun
from lmm_r1.supervised.samples import SFTSample, check_turns, encode_sample, mask_of_turns
from lmm_r1.supervised.start import Reference, prepare_policy, prepare_reference, prepare_trained
from lmm_r1.train.start import Frame
from lmm_r1.train.update import Counts, Terms

if TYPE_CHECKING:
    from typing_extensions import Self


ACCURACY, MARGIN = "pair_accuracy", "reward_margin"


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return -(1 - e) log s(b d) - e log s(-b d), with d = chosen - rejected of log-ratios and the sigmoid s.

    With e = `label_smoothing` 0: DPO, equation 7 of https://arxiv.org/abs/2305.18290. Otherwise conservative DPO,
    equation 3 of https://ericmitchell.ai/cdpo.pdf, for labels that are wrong with probability e.
    """
    logits = beta * (chosen - rejected)
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def ipo_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Return (d - 1 / (2 b))^2, with d = chosen - rejected of log-ratios.

    IPO, equation 17 of https://arxiv.org/abs/2310.12036, where b is called tau.
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def simpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return `dpo_loss` with b d - g instead of b d, where d is of the policy's mean log-probs per token.

    SimPO, equation 6 of https://arxiv.org/abs/2405.14734. It has no reference; the chosen response's reward must be
    larger by g = `gamma`.
    """
    return dpo_loss(chosen - gamma / beta, rejected, beta=beta, label_smoothing=label_smoothing)


def nll_loss(log_probs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the negative mean log-prob per token of responses; 0 for one without tokens.

    Section 4.1.4 of https://arxiv.org/abs/2407.21783 adds it to DPO's loss, and https://arxiv.org/abs/2404.19733 does so
    with other weights.

    Args:
        log_probs: of each response, summed over its tokens.
        lengths: the number of its tokens.
    """
    return -log_probs / lengths.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """The losses, rewards and log-probs of a batch of pairs; each is (B,)."""

    loss: torch.Tensor
    nll: torch.Tensor
    """Of the chosen response, per token."""
    chosen_reward: torch.Tensor
    rejected_reward: torch.Tensor
    chosen_log_prob: torch.Tensor
    """The policy's, summed over the response."""
    rejected_log_prob: torch.Tensor

    @property
    def logged(self) -> Mapping[str, torch.Tensor]:
        """What is logged in addition to the loss."""
        margin = self.chosen_reward - self.rejected_reward
        return {
            ACCURACY: (margin > 0).to(margin),
            MARGIN: margin,
            "chosen_reward": self.chosen_reward,
            "rejected_reward": self.rejected_reward,
            "chosen_log_prob": self.chosen_log_prob,
            "rejected_log_prob": self.rejected_log_prob,
            "nll_loss": self.nll,
        }


def preferences(
    policy: torch.Tensor, reference: torch.Tensor | None, loss_mask: torch.Tensor, *, model: DPOModelConfig
) -> Preferences:
    """Return the loss that the flags select and the implicit rewards of the responses.

    Args:
        policy: log-probs of loss tokens, (2 B, T - 1), 0 elsewhere; the chosen responses come first.
        reference: the same of the reference; None for SimPO.
        loss_mask: (2 B, T - 1).
    """
    lengths = loss_mask.sum(-1)  # (2 B,)
    log_probs = policy.sum(-1)
    ratios = log_probs if reference is None else log_probs - reference.sum(-1)
    if model.mean_log_probs or model.simpo_enable:
        ratios = ratios / lengths.clamp(min=1)
    chosen, rejected = ratios.chunk(2)
    beta, smoothing = model.beta, model.label_smoothing
    if model.ipo_enable:
        loss = ipo_loss(chosen, rejected, beta=beta)
    elif model.simpo_enable:
        loss = simpo_loss(chosen, rejected, beta=beta, gamma=model.simpo_gamma, label_smoothing=smoothing)
    else:
        loss = dpo_loss(chosen, rejected, beta=beta, label_smoothing=smoothing)
    chosen_log_prob, rejected_log_prob = log_probs.chunk(2)
    return Preferences(
        loss=loss,
        nll=nll_loss(chosen_log_prob, lengths.chunk(2)[0]),
        chosen_reward=beta * chosen,
        rejected_reward=beta * rejected,
        chosen_log_prob=chosen_log_prob,
        rejected_log_prob=rejected_log_prob,
    )


@dataclass(frozen=True, kw_only=True)
class PairSample:
    """Two conversations with the same prompt; their loss tokens are those of the responses."""

    chosen: SFTSample
    rejected: SFTSample

    @property
    def filler(self) -> Self:
        """A pair without loss tokens."""
        return replace(self, chosen=self.chosen.filler, rejected=self.rejected.filler)


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    sides: list[ModelSample]
    """2 B conversations: first the chosen ones, then the rejected ones in the same order."""

    @property
    def weights(self) -> torch.Tensor:
        """1 for a pair, 0 for a filler, (B,)."""
        return torch.stack([side.loss_mask.any() for side in self.sides]).chunk(2)[0].float()

    @property
    def counts(self) -> Counts:
        """Of pairs and loss tokens."""
        tokens = sum(int(side.loss_mask.sum()) for side in self.sides)
        return Counts(units=int(self.weights.sum()), tokens=tokens, samples=len(self.sides) // 2)


class PairEncoder(SampleEncoder):
    """Encodes pairs."""

    def check(self, row: PreferenceRow, fitting: ImageFitting | None) -> PreferenceRow:
        """Return the row, with images that fit unless its responses have some, too."""
        first = len(row.messages)
        outlines = [check_response(side, first=first, kit=self.kit, processor=self.processor) for side in row.sides]
        side, outline = max(zip(row.sides, outlines, strict=True), key=lambda pair: len(pair[1].token_ids))
        if fitting is None or images_of((*row.chosen, *row.rejected)):
            return row
        return replace(row, messages=fitting.fitted(side, outline).messages[:first])

    def __call__(self, row: PreferenceRow) -> PairSample | None:
        return encode_pair(row, kit=self.kit, processor=self.processor, max_len=self.max_len)


def encode_pair(row: PreferenceRow, *, kit: LmmKit, processor: Any, max_len: int) -> PairSample | None:
    """Return the row's sample, or None if one of its sides is longer than `max_len` tokens.

    Raises UserError, with the row's place, for media that cannot be used, and for a side without loss tokens.
    """
    if row.plain:
        chosen, rejected = (
            encode_sample(side, kit=kit, processor=processor, max_len=max_len, every_turn=True) for side in row.sides
        )
        return None if chosen is None or rejected is None else _pair(chosen, rejected)
    better, worse = row.sides
    encoded = encode_row(better, kit=kit, processor=processor, add_generation_prompt=False)
    other = _continued(encoded, worse, kit=kit, processor=processor)
    if other is None:
        other = encode_row(worse, kit=kit, processor=processor, add_generation_prompt=False)
    if max(len(encoded.token_ids), len(other.token_ids)) > max_len:
        return None
    first = len(row.messages)
    return _pair(
        _side(better, encoded, first=first, kit=kit, processor=processor),
        _side(worse, other, first=first, kit=kit, processor=processor),
    )


def check_response(row: Row, *, first: int, kit: LmmKit, processor: Any) -> EncodedPrompt:
    """Return the outline of one side of a pair; raises UserError if it cannot be encoded, as far as its outline tells.

    Args:
        row: a conversation whose response begins with message number `first`.
    """
    outline = outlined_row(row, kit=kit, processor=processor, add_generation_prompt=False)
    if not row.plain:
        check_turns(row, _response_turns(row, first=first), outline=outline, kit=kit, processor=processor)
    return outline


def sides_for_model(samples: Sequence[PairSample]) -> list[ModelSample]:
    """Return the sides of pairs, all chosen ones first; a pair that shares its prompt and media tensors is a group."""
    chosen, rejected = [], []
    for place, pair in enumerate(samples):
        one, other, length = pair.chosen, pair.rejected, pair.chosen.prompt_tokens
        same = length == other.prompt_tokens and one.token_ids[:length] == other.token_ids[:length]
        group = place if same and one.media is other.media else None
        chosen.append(one.for_model(group=group))
        rejected.append(other.for_model(group=group))
    return [*chosen, *rejected]


def _continued(encoded: EncodedPrompt, row: Row, *, kit: LmmKit, processor: Any) -> EncodedPrompt | None:
    """Encode a conversation with the media of another one that begins alike; return None if their media differ."""
    try:
        with placed(row.location):
            ids = kit.render(processor, row.messages, add_generation_prompt=False)
    except UserError:
        # The caller encodes it by itself, which raises the error with the row's place.
        return None
    others = encoded.engine_token_ids
    same = next((place for place, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(ids), len(others)) if same is None else same
    if not kit.placeholder_ids(processor).isdisjoint([*ids[same:], *others[same:]]):
        return None
    expanded = len(encoded.token_ids) - len(others)
    return replace(encoded, token_ids=[*encoded.token_ids[: same + expanded], *ids[same:]], engine_token_ids=ids)


def _side(row: Row, encoded: EncodedPrompt, *, first: int, kit: LmmKit, processor: Any) -> SFTSample:
    mask = mask_of_turns(row, _response_turns(row, first=first), encoded=encoded, kit=kit, processor=processor)
    return SFTSample(token_ids=encoded.token_ids, loss_mask=mask, media=encoded.media)


def _response_turns(row: Row, *, first: int) -> list[int]:
    turns = [place for place, message in enumerate(row.messages) if place >= first and message.role == "assistant"]
    if first == 0 or not turns:
        raise UserError(f"{row.location}: a response of the assistant must follow a prompt, chosen and rejected alike")
    return turns


def _pair(chosen: SFTSample, rejected: SFTSample) -> PairSample:
    for side in (chosen, rejected):
        assert any(side.loss_mask[1:]), "an assistant turn has its end token at least"
    return PairSample(chosen=chosen, rejected=rejected)


def sides_of(rows: Sequence[PreferenceRow]) -> list[Row]:
    """Return the conversations of pairs, two of each."""
    return [side for row in rows for side in row.sides]


class PairEvaluation(HeldOut["DPORun", PairSample]):
    """The means over all held-out pairs."""

    NAMES = (LOSS, ACCURACY, MARGIN, "chosen_reward", "rejected_reward")
    of_sources = (LOSS, ACCURACY)

    def _measured(self, samples: Sequence[PairSample]) -> torch.Tensor:
        found, _ = self.run.preferences(self.run.collate(samples))
        loss = found.loss + self.config.model.nll_loss_coef * found.nll
        values = [loss, *(found.logged[name] for name in self.NAMES[1:]), torch.ones_like(loss)]
        return torch.stack(values, dim=-1).double()

    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        *values, count = sums.tolist()
        return {name: value / count for name, value in zip(self.NAMES, values, strict=True)} if count else {}


class DPORun(SupervisedRun[DPOConfig, PreferenceRow, PairSample, PairBatch]):
    """The loss is the mean over pairs."""

    kind = "dpo"
    shown = (ACCURACY, MARGIN)
    encoder = PairEncoder
    evaluator = PairEvaluation

    def __init__(self, *given: Any, reference: Reference | None, **learned: Any) -> None:
        super().__init__(*given, **learned)
        self.reference = reference

    @classmethod
    def of(cls, session: Frame[DPOConfig], **learned: Any) -> Self:
        policy = prepare_policy(session, share_prefix=session.config.train.shared_prefix_enable)
        reference = prepare_reference(session.config, session.strategy, policy=policy)
        return cls(session, policy, reference=reference, **learned)

    @classmethod
    def load(
        cls, config: DPOConfig, path: str, *, split: str, check: RowCheck[PreferenceRow]
    ) -> KeptRows[PreferenceRow]:
        return judged_rows(config, path, split=split, check=check)

    @classmethod
    def conversations(cls, rows: Sequence[PreferenceRow]) -> list[Row]:
        return sides_of(rows)

    def collate(self, samples: Sequence[PairSample]) -> PairBatch:
        return PairBatch(sides=sides_for_model(samples))

    def counts(self, batch: PairBatch) -> Counts:
        return batch.counts

    def terms(self, batch: PairBatch) -> Terms:
        """Return the preference loss of the batch, plus the weighted loss of the chosen responses."""
        found, aux_loss = self.preferences(batch)
        weights = batch.weights.to(found.loss)
        loss = found.loss + self.config.model.nll_loss_coef * found.nll
        sums = {name: (value.detach() * weights).sum() for name, value in found.logged.items()}
        return Terms(loss=(loss * weights).sum(), aux_loss=aux_loss, sums=sums)

    def preferences(self, batch: PairBatch) -> tuple[Preferences, torch.Tensor | float]:
        """Return the losses and rewards of a batch, and the load-balancing loss of experts."""
        reference = None if self.reference is None else self.reference.log_probs(batch.sides)
        policy, aux_loss = self.policy_log_probs(batch.sides)
        mask = stacked(batch.sides, lambda side: side.loss_mask).to(policy.device)
        return preferences(policy, reference, mask, model=self.config.model), aux_loss


def bradley_terry_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, margin: torch.Tensor | None) -> torch.Tensor:
    """Return -log s(chosen - rejected - margin) of rewards, with the sigmoid s.

    Equation 1 of https://arxiv.org/abs/2203.02155 (InstructGPT), after Bradley and Terry (1952); with a margin equation 2
    of https://arxiv.org/abs/2307.09288, section 3.2.2.
    """
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)


def score_loss(chosen: torch.Tensor, rejected: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the mean over both responses of (reward - score)^2.

    Args:
        scores: of the chosen responses and of the rejected ones, (2, B).
    """
    return (torch.stack([chosen, rejected]) - scores).square().mean(0)


@dataclass(frozen=True, kw_only=True)
class RewardSample(PairSample):
    margin: float
    scores: tuple[float, float]
    """Of the chosen and of the rejected response; unused if the row has none."""


@dataclass(frozen=True, kw_only=True)
class RewardBatch(PairBatch):
    margins: torch.Tensor  # (B,)
    scores: torch.Tensor  # (2, B)


class RewardEncoder(PairEncoder):
    """Encodes pairs with their margins and scores."""

    def __call__(self, row: PreferenceRow) -> RewardSample | None:
        pair = super().__call__(row)
        if pair is None:
            return None
        return RewardSample(
            chosen=_to_end(pair.chosen),
            rejected=_to_end(pair.rejected),
            margin=row.margin or 0.0,
            scores=(row.chosen_score or 0.0, row.rejected_score or 0.0),
        )


def _to_end(sample: SFTSample) -> SFTSample:
    """Return a sample up to its end token, at which a served model scores responses."""
    end = len(sample.loss_mask) - sample.loss_mask[::-1].index(True)
    return replace(sample, token_ids=sample.token_ids[:end], loss_mask=sample.loss_mask[:end])


# Bins of the confidence with which a pair is ranked, from 0.5 to 1.
BINS = 10


class RewardEvaluation(HeldOut["RMRun", RewardSample]):
    """The means over all held-out pairs, and the calibration of the model's rankings."""

    of_sources = (LOSS, ACCURACY)

    def _measured(self, samples: Sequence[RewardSample]) -> torch.Tensor:
        batch = self.run.collate(samples)
        chosen, rejected = (rewards.double() for rewards in self.run.rewards(batch))
        margin = chosen - rejected
        correct = (margin > 0).to(margin)
        values = [
            self.run.losses(batch, chosen, rejected),
            correct,
            margin,
            chosen + rejected,
            chosen.square() + rejected.square(),
            torch.ones_like(margin),
        ]
        # The model's confidence in its ranking, right or wrong, is at least 0.5.
        confidence = margin.abs().sigmoid()
        places = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
        chosen_bin = F.one_hot(places, BINS).to(margin)  # (B, BINS)
        binned = torch.cat([chosen_bin * confidence[:, None], chosen_bin * correct[:, None]], dim=-1)
        return torch.cat([torch.stack(values, dim=-1), binned], dim=-1)

    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        loss, correct, margin, total, squares, count = sums[:6].tolist()
        if not count:
            return {}
        mean = total / (2 * count)
        confidence, right = sums[6:].chunk(2)
        return {
            LOSS: loss / count,
            ACCURACY: correct / count,
            MARGIN: margin / count,
            "reward_mean": mean,
            "reward_std": max(0.0, squares / (2 * count) - mean**2) ** 0.5,
            "calibration_error": float((confidence - right).abs().sum()) / count,
        }


class RMRun(SupervisedRun[RMConfig, PreferenceRow, RewardSample, RewardBatch]):
    """The loss is the mean over pairs."""

    kind = "rm"
    shown = (ACCURACY, MARGIN)
    encoder = RewardEncoder
    evaluator = RewardEvaluation

    @classmethod
    def load(
        cls, config: RMConfig, path: str, *, split: str, check: RowCheck[PreferenceRow]
    ) -> KeptRows[PreferenceRow]:
        def check_row(row: PreferenceRow) -> PreferenceRow:
            if config.model.loss_type == "regression" and None in (row.chosen_score, row.rejected_score):
                raise UserError(
                    f"{row.location}: --model.loss_type regression needs the scores of both responses, in the columns "
                    "chosen_score and rejected_score; add them, or take --model.loss_type sigmoid"
                )
            return check(row)

        return judged_rows(config, path, split=split, check=check_row)

    @classmethod
    def conversations(cls, rows: Sequence[PreferenceRow]) -> list[Row]:
        return sides_of(rows)

    @classmethod
    def of(cls, session: Frame[RMConfig], **learned: Any) -> Self:
        """Return the run of a session, with the value head of the checkpoint if it has one."""
        config = session.config
        model = KitValueModel(
            model_path(config),
            "critic",
            trained_settings(config, share_prefix=config.train.shared_prefix_enable),
            value_head_prefix=config.ds.value_head_prefix,
            ds_config=session.strategy.get_ds_train_config(),
        )
        return cls(session, prepare_trained(session, model), **learned)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, which wraps all of a value model."""
        return self.actor

    def finish(self) -> None:
        """Write the mean and deviation of held-out rewards to the model's config; its users may normalize with them."""
        if self.evaluation is None:
            return
        # A run that was stopped between its last evaluation and its end has no metrics yet.
        metrics = self.evaluation.last or self.evaluation.evaluate(self.actor)
        config = self.engine.module.model.config
        config.mean, config.std = metrics["eval_reward_mean"], max(metrics["eval_reward_std"], 1e-8)

    def collate(self, samples: Sequence[RewardSample]) -> RewardBatch:
        return RewardBatch(
            sides=sides_for_model(samples),
            margins=torch.tensor([sample.margin for sample in samples]),
            scores=torch.tensor([sample.scores for sample in samples]).T,
        )

    def counts(self, batch: RewardBatch) -> Counts:
        return batch.counts

    def terms(self, batch: RewardBatch) -> Terms:
        chosen, rejected = self.rewards(batch)
        weights = batch.weights.to(chosen)
        logged = {
            ACCURACY: (chosen > rejected).to(chosen),
            MARGIN: chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        sums = {name: (value.detach() * weights).sum() for name, value in logged.items()}
        return Terms(loss=(self.losses(batch, chosen, rejected) * weights).sum(), sums=sums)

    def rewards(self, batch: RewardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards of chosen and of rejected responses, (B,) each; every rank calls it equally often."""
        rewards = self.engine(batch.sides, of_samples=True, ring_attn_group=self.strategy.ring_attn_group)
        chosen, rejected = rewards.chunk(2)
        return chosen, rejected

    def losses(self, batch: RewardBatch, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, (B,)."""
        if self.config.model.loss_type == "regression":
            return score_loss(chosen, rejected, batch.scores.to(chosen))
        margin = batch.margins.to(chosen) if self.config.model.margin_loss_enable else None
        return bradley_terry_loss(chosen, rejected, margin=margin)
