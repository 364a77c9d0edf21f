"""Conversations and plain texts as supervised samples: ids, their loss mask, and the media tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit, Media
from lmm_r1.lmm_kits.checkpoint import encode_row, outlined_row, plain_ids
from lmm_r1.trainer.supervised_rows import batch_indices as batch_indices
from lmm_r1.trainer.turn_mask import RewrittenHistory, check_turns, mask_of_turns

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class SFTSample:
    token_ids: list[int]
    loss_mask: list[bool]
    """True for each token of an assistant turn's text, and for its end token; in pre-training for all but tokens of media."""
    media: Media | None

    @property
    def filler(self) -> SFTSample:
        """A sample that teaches nothing."""
        return replace(self, loss_mask=[False] * len(self.loss_mask))


@dataclass(frozen=True, kw_only=True)
class SFTBatch:
    sequences: torch.Tensor  # (B, T), padded on the right
    attention_mask: torch.Tensor  # (B, T)
    loss_mask: torch.Tensor  # (B, T - 1): whether the loss takes the next token
    media: list[Media | None]  # B entries


def encode_sample(
    row: Row, *, kit: LmmKit, processor: Any, max_len: int, every_turn: bool, every_token: bool = False
) -> SFTSample | None:
    """Return the row's sample, or None when it is longer than `max_len` tokens (an image prompt cannot be cut).

    Args:
        every_turn: the loss takes all assistant turns, not the last alone.
        every_token: the loss takes every token but those of media, as in pre-training.
    """
    if row.plain:
        sample = _plain_sample(row, kit=kit, processor=processor, every_token=every_token)
        return None if len(sample.token_ids) > max_len else sample
    encoded = encode_row(row, kit=kit, processor=processor, add_generation_prompt=False)
    if len(encoded.token_ids) > max_len:
        return None
    if every_token:
        media = kit.media_ids(processor)
        mask = [token not in media for token in encoded.token_ids]
        return SFTSample(token_ids=encoded.token_ids, loss_mask=mask, media=encoded.media)
    mask = mask_of_turns(row, loss_turns(row, every_turn=every_turn), encoded=encoded, kit=kit, processor=processor)
    return SFTSample(token_ids=encoded.token_ids, loss_mask=mask, media=encoded.media)


def check_sample(row: Row, *, kit: LmmKit, processor: Any, every_turn: bool, every_token: bool = False) -> None:
    """Raise UserError where `encode_sample` would, as far as that is told without reading pixels; see `outlined_row`."""
    outline = outlined_row(row, kit=kit, processor=processor, add_generation_prompt=False)
    if row.plain or every_token:
        return
    turns = loss_turns(row, every_turn=every_turn)
    try:
        check_turns(row, turns, outline=outline, kit=kit, processor=processor)
    except RewrittenHistory as error:
        if len(turns) == 1:
            raise
        raise UserError(f"{error}, and SFT learns the last turn only by --data.no_multiturn") from error


def _plain_sample(row: Row, *, kit: LmmKit, processor: Any, every_token: bool) -> SFTSample:
    parts = plain_ids(row, kit=kit, processor=processor)
    mask = [every_token or message.role == "assistant" for message in row.messages]
    if every_token and row.messages[-1].role != "assistant":
        # Where one text ends and another begins in generation.
        parts[-1] = [*parts[-1], kit.tokenizer_of(processor).eos_token_id]
    return SFTSample(
        token_ids=[token for part in parts for token in part],
        loss_mask=[counts for part, counts in zip(parts, mask, strict=True) for _ in part],
        media=None,
    )


def collate(samples: Sequence[SFTSample], *, pad_token_id: int) -> SFTBatch:
    """Pad samples on the right into one batch."""
    import torch

    width = max(len(sample.token_ids) for sample in samples)
    sequences = torch.full((len(samples), width), pad_token_id)
    attention_mask = torch.zeros(len(samples), width, dtype=torch.long)
    loss_mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for index, sample in enumerate(samples):
        length = len(sample.token_ids)
        sequences[index, :length] = torch.tensor(sample.token_ids)
        attention_mask[index, :length] = 1
        loss_mask[index, :length] = torch.tensor(sample.loss_mask)
    return SFTBatch(
        sequences=sequences,
        attention_mask=attention_mask,
        loss_mask=loss_mask[:, 1:],
        media=[sample.media for sample in samples],
    )


def loss_turns(row: Row, *, every_turn: bool) -> list[int]:
    """Return the indices of the assistant turns that the loss takes, all or the last; raises UserError where there is none."""
    turns = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    turns = turns if every_turn else turns[-1:]
    if not turns or turns[0] == 0:
        raise UserError(
            f"{row.location}: an assistant turn must follow a prompt; SFT rows end with one, or name the column with the "
            "response by --data.output_key, or learn plain text with --model.pretrain_mode_enable"
        )
    return turns
