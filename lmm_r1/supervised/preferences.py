"""Losses, samples and rows that preference trainers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lmm_r1.config import DPOConfig, RMConfig
from lmm_r1.config.shared import named_reading
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import PREFERENCE, PreferenceRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.checkpoint import encode_row, outlined_row
from lmm_r1.lmm_kits.encoding import placed
from lmm_r1.supervised.rows import RowCheck, SampleEncoder, blended_rows, judged_rows, passes
from lmm_r1.supervised.samples import SFTBatch, SFTSample, check_turns, collate, encode_sample, mask_of_turns

if TYPE_CHECKING:
    import torch


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return -(1 - e) log s(b d) - e log s(-b d), with d = chosen - rejected of log-ratios and the sigmoid s.

    With e = `label_smoothing` 0: DPO, equation 7 of https://arxiv.org/abs/2305.18290; else conservative DPO, equation 3 of
    https://ericmitchell.ai/cdpo.pdf, for labels that are wrong with probability e.
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
    """Return what `dpo_loss` does of b d - g in the place of b d, with d of the policy's mean log-probs per token.

    SimPO, equation 6 of https://arxiv.org/abs/2405.14734: without a reference, the chosen response's reward is to be
    larger by g = `gamma`.
    """
    return dpo_loss(chosen - gamma / beta, rejected, beta=beta, label_smoothing=label_smoothing)


def nll_loss(log_probs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the negative mean log-prob per token of responses; 0 for one without tokens.

    The term that is added to DPO's loss in section 4.1.4 of https://arxiv.org/abs/2407.21783, and, with other
    weights, in https://arxiv.org/abs/2404.19733.

    Args:
        log_probs: of each response, summed over its tokens.
        lengths: its tokens.
    """
    return -log_probs / lengths.clamp(min=1)


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
        desirable: whether each response is to be learned, bool.
        kl: an estimate of the policy's KL divergence from the reference, not negative, (); no gradient flows into it.
    """
    logits = beta * (ratios - kl.detach())
    # 1 - s(x) = s(-x), without the loss of digits near 1.
    return torch.where(desirable, desirable_weight * F.sigmoid(-logits), undesirable_weight * F.sigmoid(logits))


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
class PairSample:
    """Two conversations that begin alike; their loss tokens are those of the responses."""

    chosen: SFTSample
    rejected: SFTSample

    @property
    def filler(self) -> PairSample:
        """A pair that teaches nothing."""
        return PairSample(chosen=self.chosen.filler, rejected=self.rejected.filler)


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Pairs as one batch: B chosen conversations, and then the B rejected ones in the same order."""

    tokens: SFTBatch
    """Of 2 B conversations."""

    @property
    def weights(self) -> torch.Tensor:
        """Which pairs count, (B,): 1, or 0 for one that only fills the batch."""
        return self.tokens.loss_mask.any(-1).chunk(2)[0].float()


def encode_pair(row: PreferenceRow, *, kit: LmmKit, processor: Any, max_len: int) -> PairSample | None:
    """Return the row's sample, or None where one of its sides is longer than `max_len` tokens.

    Raises UserError, with the row's place, for media that cannot be taken, and for a side without loss tokens.
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


def check_pair(row: PreferenceRow, *, kit: LmmKit, processor: Any) -> None:
    """Raise UserError where `encode_pair` would, as far as that is told without reading pixels."""
    for side in row.sides:
        check_response(side, first=len(row.messages), kit=kit, processor=processor)


def check_response(row: Row, *, first: int, kit: LmmKit, processor: Any) -> None:
    """Raise UserError where one side of a pair cannot be encoded, as `check_pair` does.

    Args:
        row: a conversation whose response begins with message number `first`.
    """
    outline = outlined_row(row, kit=kit, processor=processor, add_generation_prompt=False)
    if not row.plain:
        check_turns(row, _response_turns(row, first=first), outline=outline, kit=kit, processor=processor)


def collate_pairs(samples: Sequence[PairSample], *, pad_token_id: int) -> PairBatch:
    """Pad pairs on the right into one batch."""
    sides = [*(sample.chosen for sample in samples), *(sample.rejected for sample in samples)]
    return PairBatch(tokens=collate(sides, pad_token_id=pad_token_id))


def _continued(encoded: EncodedPrompt, row: Row, *, kit: LmmKit, processor: Any) -> EncodedPrompt | None:
    """Return a conversation encoded by another one's media, which both have at their beginning; None where they differ."""
    try:
        with placed(row.location):
            ids = kit.render(processor, row.messages, add_generation_prompt=False, videos=encoded.videos)
    except UserError:
        # Encoding it by itself says so, with the row's place.
        return None
    others = encoded.engine_token_ids
    same = next((place for place, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(ids), len(others)) if same is None else same
    placeholders = kit.placeholder_ids(processor)
    if not placeholders.isdisjoint([*ids[same:], *others[same:]]):
        return None
    expanded = len(encoded.token_ids) - len(others)
    token_ids = [*encoded.token_ids[: same + expanded], *ids[same:]]
    return replace(encoded, token_ids=token_ids, engine_token_ids=ids)


def _side(row: Row, encoded: EncodedPrompt, *, first: int, kit: LmmKit, processor: Any) -> SFTSample:
    """Return a side whose response begins with message number `first`; its assistant turns are loss tokens."""
    turns = _response_turns(row, first=first)
    mask = mask_of_turns(row, turns, encoded=encoded, kit=kit, processor=processor)
    return SFTSample(token_ids=encoded.token_ids, loss_mask=mask, media=encoded.media)


def _response_turns(row: Row, *, first: int) -> list[int]:
    """Return the places of a response's assistant turns; raises UserError where there is none behind a prompt."""
    turns = [place for place, message in enumerate(row.messages) if place >= first and message.role == "assistant"]
    if first == 0 or not turns:
        raise UserError(f"{row.location}: a response of the assistant must follow a prompt, chosen and rejected alike")
    return turns


def _pair(chosen: SFTSample, rejected: SFTSample) -> PairSample:
    assert any(chosen.loss_mask[1:]), "an assistant turn has its end token at least"
    assert any(rejected.loss_mask[1:]), "an assistant turn has its end token at least"
    return PairSample(chosen=chosen, rejected=rejected)


def training_pairs(
    config: DPOConfig | RMConfig, *, check: RowCheck[PreferenceRow] = passes
) -> KeptRows[PreferenceRow]:
    """Return the pairs of `--data.dataset`; raises UserError where they cannot be learned from, or are too few."""
    return blended_rows(config, lambda path: _load(config, path, split=config.data.dataset_split, check=check))


def evaluation_pairs(
    config: DPOConfig | RMConfig, *, check: RowCheck[PreferenceRow] = passes
) -> KeptRows[PreferenceRow]:
    """Return the pairs of `--eval.dataset`, none without."""
    path = config.eval.dataset
    return KeptRows() if path is None else _load(config, path, split=config.eval.split, check=check)


def _load(
    config: DPOConfig | RMConfig, path: str, *, split: str, check: RowCheck[PreferenceRow]
) -> KeptRows[PreferenceRow]:
    data = config.data
    reading = named_reading(data, prompt=data.prompt_key, prefix="--data.")
    names = replace(reading.names, chosen=data.chosen_key, rejected=data.rejected_key, prompt_flag="--data.prompt_key")
    # As in OpenRLHF, a column of text that is named goes in as it stands where no chat template is asked for.
    is_plain = data.prompt_key is not None and not data.apply_chat_template
    template = (data.input_template or "{}") if is_plain else None
    reading = replace(reading, names=names, plain_template=template)
    return judged_rows(path, PREFERENCE, split=split, reading=reading, bad_rows=data.bad_rows, check=check)


def sides_of(rows: Sequence[PreferenceRow]) -> list[Row]:
    """Return the conversations of pairs, two of each."""
    return [side for row in rows for side in row.sides]


class PairEncoder(SampleEncoder):
    """Makes samples of pairs."""

    def check(self, row: PreferenceRow) -> None:
        check_pair(row, kit=self.kit, processor=self.processor)

    def __call__(self, row: PreferenceRow) -> PairSample | None:
        """Return the row's sample, None where it is too long; raises UserError for media that cannot be taken."""
        return encode_pair(row, kit=self.kit, processor=self.processor, max_len=self.max_len)
