"""Conversations and plain texts as supervised samples: ids, their loss mask, and the media tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, Media
from lmm_r1.lmm_kits.checkpoint import encode_row, outlined_row, plain_ids
from lmm_r1.lmm_kits.encoding import placed
from lmm_r1.trainer.supervised_rows import batch_indices as batch_indices

if TYPE_CHECKING:
    import torch

# Tokens at the end of a turn that messages show.
_SHOWN_END = 4


class RewrittenHistory(UserError):
    """A chat template writes a turn in another way once more turns follow."""


@dataclass(frozen=True, kw_only=True)
class SFTSample:
    token_ids: list[int]
    loss_mask: list[bool]
    """True for each token that an assistant turn consists of, its end token included; in pre-training for all but media."""
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
        every_token: the loss takes every token but placeholders, as in pre-training.
    """
    if row.plain:
        sample = _plain_sample(row, kit=kit, processor=processor, every_token=every_token)
        return None if len(sample.token_ids) > max_len else sample
    encoded = encode_row(row, kit=kit, processor=processor, add_generation_prompt=False)
    if len(encoded.token_ids) > max_len:
        return None
    if every_token:
        placeholders = kit.placeholder_ids(processor)
        mask = [token not in placeholders for token in encoded.token_ids]
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


def check_turns(row: Row, turns: Sequence[int], *, outline: EncodedPrompt, kit: LmmKit, processor: Any) -> None:
    """Raise UserError where `mask_of_turns` cannot tell those turns of a conversation apart."""
    for turn in turns:
        _span(row, turn=turn, kit=kit, processor=processor, whole=outline)


def mask_of_turns(
    row: Row, turns: Sequence[int], *, encoded: EncodedPrompt, kit: LmmKit, processor: Any
) -> list[bool]:
    """Return which tokens of an encoded conversation those turns consist of, their end tokens included.

    Raises UserError where the chat template does not let them be told apart.
    """
    loss_mask = [False] * len(encoded.token_ids)
    placeholders = kit.placeholder_ids(processor)
    for turn in turns:
        start, end = _span(row, turn=turn, kit=kit, processor=processor, whole=encoded)
        before = replace(row, messages=row.messages[:turn])
        through = replace(row, messages=row.messages[: turn + 1])
        start += _shift(before, at=start, kit=kit, processor=processor, whole=encoded, add_generation_prompt=True)
        end += _shift(through, at=end, kit=kit, processor=processor, whole=encoded, add_generation_prompt=False)
        for index in range(start, end):
            loss_mask[index] = encoded.token_ids[index] not in placeholders
    return loss_mask


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


def _span(row: Row, *, turn: int, kit: LmmKit, processor: Any, whole: EncodedPrompt) -> tuple[int, int]:
    """Return [start, end) of an assistant turn in the ids with one placeholder per image or video, end token included."""
    ids, videos = whole.engine_token_ids, whole.videos
    with placed(row.location):
        before = kit.render(processor, row.messages[:turn], add_generation_prompt=True, videos=videos)
        through = (
            ids
            if turn + 1 == len(row.messages)
            else kit.render(processor, row.messages[: turn + 1], add_generation_prompt=False, videos=videos)
        )
    # The last token of either may have grown together with the text behind it.
    if any(ids[: len(part) - 1] != part[:-1] for part in (before, through)):
        raise RewrittenHistory(
            f"{row.location}: the chat template writes the messages up to {turn + 1} differently when more follow, so "
            "the tokens of that turn cannot be told apart; a training takes another template by --data.tokenizer_chat_template"
        )
    start, end = len(before), len(through)
    tokenizer = kit.tokenizer_of(processor)
    # What the template puts behind the end token (a newline) is never sampled, so the loss leaves it out.
    while end > start and ids[end - 1] != tokenizer.eos_token_id:
        end -= 1
    if end == start:
        end_token = tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False)
        written = tokenizer.decode(ids[start : len(through)][-_SHOWN_END:], skip_special_tokens=False)
        raise UserError(
            f"{row.location}: the chat template ends an assistant turn with {written!r}, in which the tokenizer's end token "
            f"{end_token} is missing, so that no end would be learned; let eos_token in the checkpoint's "
            "tokenizer_config.json be the token that the template writes"
        )
    return start, end


def _shift(
    before: Row, *, at: int, kit: LmmKit, processor: Any, whole: EncodedPrompt, add_generation_prompt: bool
) -> int:
    """Return how many ids the media of `before` add, at position `at` of the ids with one placeholder for each of them."""
    ids, placeholders = whole.engine_token_ids, kit.placeholder_ids(processor)
    if placeholders.isdisjoint(ids[:at]):
        return 0
    if placeholders.isdisjoint(ids[at:]):
        return len(whole.token_ids) - len(ids)
    # Between media. What a placeholder is expanded to may hold text, so that only encoding tells its length.
    encoded = encode_row(before, kit=kit, processor=processor, add_generation_prompt=add_generation_prompt)
    return len(encoded.token_ids) - len(encoded.engine_token_ids)
