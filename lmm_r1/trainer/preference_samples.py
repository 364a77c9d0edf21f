"""Pairs of responses as samples: what they have in common is encoded once, and has the same media tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import PreferenceRow
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.checkpoint import encode_row, outlined_row
from lmm_r1.lmm_kits.encoding import placed
from lmm_r1.trainer.sft_samples import SFTBatch, SFTSample, collate, encode_sample
from lmm_r1.trainer.turn_mask import check_turns, mask_of_turns

if TYPE_CHECKING:
    import torch


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
