"""Samples of supervised training: encoded turns and their loss masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, Media
from lmm_r1.lmm_kits.checkpoint import bordered_ids, encode_row, outlined_row, plain_ids
from lmm_r1.lmm_kits.encoding import control_ids, drops_thought, placed
from lmm_r1.models.packed.packing import ModelSample

# How SentencePiece writes a space; some tokenizers put one before each piece of text.
_SPACE = "▁"
# Tokens at the end of a turn that messages quote.
_SHOWN_END = 4


class RewrittenHistory(UserError):
    """A chat template writes a turn differently when more turns follow."""


def check_turns(row: Row, turns: Sequence[int], *, outline: EncodedPrompt, kit: LmmKit, processor: Any) -> None:
    """Raise UserError if `mask_of_turns` cannot find these turns in a conversation."""
    for turn in turns:
        _span(row, turn=turn, kit=kit, processor=processor, whole=outline)


def mask_of_turns(
    row: Row, turns: Sequence[int], *, encoded: EncodedPrompt, kit: LmmKit, processor: Any
) -> list[bool]:
    """Return which tokens of an encoded conversation belong to these turns, including their end tokens.

    In a turn with images or videos these are the tokens of its texts. The tokens of a medium (placeholders, markers, times
    of frames, line breaks) and those that the template writes next to it do not count.

    Raises UserError if the chat template does not allow turns, or texts and media, to be separated.
    """
    spans = {turn: _span(row, turn=turn, kit=kit, processor=processor, whole=encoded) for turn in turns}
    mask = [False] * len(encoded.token_ids)
    if kit.placeholder_ids(processor).isdisjoint(encoded.engine_token_ids):
        for start, end in spans.values():
            mask[start:end] = [True] * (end - start)
        return mask
    found = _Turns(row=row, encoded=encoded, kit=kit, processor=processor)
    for turn, span in spans.items():
        start, kept = found.kept(turn, span)
        mask[start : start + len(kept)] = kept
    return mask


@dataclass(kw_only=True)
class _Turns:
    """Finds the turns of a conversation with media in its expanded ids."""

    row: Row
    encoded: EncodedPrompt
    kit: LmmKit
    processor: Any

    @cached_property
    def _media(self) -> frozenset[int]:
        return self.kit.media_ids(self.processor)

    @cached_property
    def _anchors(self) -> frozenset[int]:
        """Tokens that only the chat template writes: the same ones, in the same order, however media are expanded."""
        end = self.kit.tokenizer_of(self.processor).eos_token_id
        return (control_ids(self.kit, self.processor) | {end}) - self._media

    @cached_property
    def _bordered(self) -> tuple[list[int], int]:
        return bordered_ids(self.row, kit=self.kit, processor=self.processor)

    def kept(self, turn: int, span: tuple[int, int]) -> tuple[int, list[bool]]:
        """Return where a turn begins in the expanded ids, and which of its tokens are loss tokens.

        Args:
            span: its start and end in the ids with one placeholder per medium.
        """
        start, end = span
        ids, whole = self.encoded.engine_token_ids, self.encoded.token_ids
        last = self._place(end, turn=turn, among=whole)
        # A template may write media in place of the line break that opens a turn.
        while ids[start - 1] in self._media:
            start -= 1
        if self._media.isdisjoint(ids[start:end]):
            return last - (end - start), [True] * (end - start)
        first = self._place(start, turn=turn, among=whole)
        bordered, border = self._bordered
        known = bordered[self._place(start, turn=turn, among=bordered) : self._place(end, turn=turn, among=bordered)]
        kept = self._carried(known, whole[first:last], border=border)
        if kept is None:
            raise self._refusal(turn)
        return first, kept

    def _place(self, position: int, *, turn: int, among: Sequence[int]) -> int:
        """Return the place in expanded ids of a position in those with one placeholder per medium."""
        ids = self.encoded.engine_token_ids
        before = [place for place, token in enumerate(ids[:position]) if token in self._anchors]
        others = [place for place, token in enumerate(among) if token in self._anchors]
        alike = [ids[place] for place in before] == [among[place] for place in others[: len(before)]]
        if not before or not alike or not self._media.isdisjoint(ids[before[-1] : position]):
            raise self._refusal(turn)
        return others[len(before) - 1] + position - before[-1]

    def _carried(self, known: Sequence[int], token_ids: Sequence[int], *, border: int) -> list[bool] | None:
        """Return which tokens of a turn are text, by its ids with borders; None if these are of a different text."""
        flags = self._kept_with_borders(known, border=border)
        known = [token for token in known if token != border]
        if known == token_ids:
            return flags
        # Next to a border, text may be tokenized differently.
        for left_out in ("", _SPACE):
            pieces, others = (self._pieces(ids, left_out=left_out) for ids in (known, token_ids))
            if "".join(pieces) == "".join(others):
                return _by_token([flag for piece, flag in zip(pieces, flags, strict=True) for _ in piece], others)
        return None

    def _kept_with_borders(self, known: Sequence[int], *, border: int) -> list[bool]:
        """Return which tokens other than borders are kept: those in texts, and those between texts without media."""
        flags: list[bool] = []
        stretch: list[int] = []
        inside = False
        for token in [*known, border]:
            if token != border:
                stretch.append(token)
                continue
            flags += [inside or self._media.isdisjoint(stretch)] * len(stretch)
            stretch, inside = [], not inside
        # The end token follows the last medium if the turn ends in one.
        return [*flags[:-1], True]

    def _pieces(self, token_ids: Sequence[int], *, left_out: str) -> list[str]:
        pieces = self.kit.tokenizer_of(self.processor).convert_ids_to_tokens(list(token_ids))
        return [piece.replace(left_out, "") if left_out else piece for piece in pieces]

    def _refusal(self, turn: int) -> UserError:
        return UserError(
            f"{self.row.location}: message {turn + 1} holds images or videos, or follows some, and this checkpoint's chat "
            "template does not let its text be told from them; leave the row out"
        )


def _by_token(by_character: Sequence[bool], pieces: Sequence[str]) -> list[bool]:
    """Return which tokens have only kept characters; a token without characters counts as its neighbours do."""
    flags, start = [], 0
    for piece in pieces:
        end = start + len(piece)
        flags.append(all(by_character[start:end] if piece else by_character[max(0, start - 1) : start + 1]))
        start = end
    return flags


def _begins(ids: Sequence[int], part: Sequence[int]) -> bool:
    """Return whether ids begin with a part, whose last token may have grown together with the text after it."""
    return list(ids[: len(part) - 1]) == list(part[:-1])


def _span(row: Row, *, turn: int, kit: LmmKit, processor: Any, whole: EncodedPrompt) -> tuple[int, int]:
    """Return [start, end) of an assistant turn with its end token, in the ids with one placeholder per medium."""
    ids = whole.engine_token_ids
    if drops_thought(kit, processor, row.messages[turn]):
        raise UserError(
            f"{row.location}: the chat template drops message {turn + 1}'s thought; set --data.tokenizer_chat_template"
        )
    with placed(row.location):
        before = kit.render(processor, row.messages[:turn], add_generation_prompt=True)
        through = (
            ids
            if turn + 1 == len(row.messages)
            else kit.render(processor, row.messages[: turn + 1], add_generation_prompt=False)
        )
    if not _begins(through, before):
        with placed(row.location):
            closed = kit.render(processor, row.messages[:turn], add_generation_prompt=False)
        if _begins(through, closed):
            raise UserError(
                f"{row.location}: the chat template's generation prompt is not how it begins message {turn + 1} (does it end "
                "a thought, and the message has one?); give another template by --data.tokenizer_chat_template: the "
                "checkpoint's own with {%- set enable_thinking = true %} in front, if it reads that"
            )
    if not (_begins(ids, before) and _begins(ids, through)):
        raise RewrittenHistory(
            f"{row.location}: the chat template writes the messages up to {turn + 1} differently when more follow, so "
            "the tokens of that turn cannot be told apart (does it drop earlier thoughts? with {%- set preserve_thinking = true "
            "%} in front it may keep them); a training takes another template by --data.tokenizer_chat_template"
        )
    start, end = len(before), len(through)
    tokenizer = kit.tokenizer_of(processor)
    # The template's text after the end token (a newline) is never sampled, so it is not in the loss.
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


@dataclass(frozen=True, kw_only=True)
class SFTSample:
    token_ids: list[int]
    loss_mask: list[bool]
    """True for tokens of an assistant turn's text and for its end token; in pre-training for all but tokens of media."""
    media: Media | None

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens before the first loss token; all of a filler."""
        return self.loss_mask.index(True) if any(self.loss_mask) else len(self.token_ids)

    @property
    def filler(self) -> SFTSample:
        """The sample without loss tokens."""
        return replace(self, loss_mask=[False] * len(self.loss_mask))

    def for_model(self, *, group: int | None = None) -> ModelSample:
        """Return what a model computes of it."""
        return ModelSample(
            token_ids=torch.tensor(self.token_ids),
            loss_mask=torch.tensor(self.loss_mask[1:], dtype=torch.bool),
            media=self.media,
            group=group,
            prompt_tokens=self.prompt_tokens,
        )


def encode_sample(
    row: Row, *, kit: LmmKit, processor: Any, max_len: int, every_turn: bool, every_token: bool = False
) -> SFTSample | None:
    """Return the row's sample, or None when it is longer than `max_len` tokens (an image prompt cannot be cut).

    Args:
        every_turn: all assistant turns are in the loss, not only the last one.
        every_token: all tokens except those of media are in the loss, as in pre-training.
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


def check_sample(
    row: Row, *, kit: LmmKit, processor: Any, every_turn: bool, every_token: bool = False
) -> EncodedPrompt:
    """Return the row's outline; raises UserError if `encode_sample` would, as far as `outlined_row` can tell."""
    outline = outlined_row(row, kit=kit, processor=processor, add_generation_prompt=False)
    if every_token and any(message.loss is False for message in row.messages):
        raise UserError(
            f"{row.location}: a turn is marked as not in the loss, and --model.pretrain_mode_enable trains on every token; "
            "leave the flag or the row out"
        )
    if row.plain or every_token:
        return outline
    turns = loss_turns(row, every_turn=every_turn)
    try:
        check_turns(row, turns, outline=outline, kit=kit, processor=processor)
    except RewrittenHistory as error:
        if len(turns) == 1:
            raise
        raise UserError(f"{error}, and SFT learns the last turn only by --data.no_multiturn") from error
    return outline


def _plain_sample(row: Row, *, kit: LmmKit, processor: Any, every_token: bool) -> SFTSample:
    parts = plain_ids(row, kit=kit, processor=processor)
    mask = [every_token or message.role == "assistant" for message in row.messages]
    if every_token and row.messages[-1].role != "assistant":
        parts[-1] = [*parts[-1], kit.tokenizer_of(processor).eos_token_id]
    return SFTSample(
        token_ids=[token for part in parts for token in part],
        loss_mask=[counts for part, counts in zip(parts, mask, strict=True) for _ in part],
        media=None,
    )


def loss_turns(row: Row, *, every_turn: bool) -> list[int]:
    """Return the indices of the assistant turns in the loss; raises UserError if there is none, or another turn is marked.

    These are all turns or the last one, unless the row marks a turn as in the loss or not.
    """
    turns = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    usual = turns if every_turn else turns[-1:]
    if not usual or usual[0] == 0:
        raise UserError(
            f"{row.location}: an assistant turn must follow a prompt; SFT rows end with one, or name the column with the "
            "response by --data.output_key, or learn plain text with --model.pretrain_mode_enable"
        )
    marks = [message.loss for message in row.messages]
    marked = [index for index, mark in enumerate(marks) if mark or (mark is None and index in usual)]
    if (other := next((index for index in marked if not index or index not in turns), None)) is not None:
        raise UserError(
            f"{row.location}: message {other + 1} ({row.messages[other].role}) is marked as in the loss, and SFT trains on "
            "turns of the assistant after a prompt only; remove the mark"
        )
    if not marked:
        raise UserError(f"{row.location}: every turn is marked as not in the loss; mark one as in it, or drop the row")
    return marked
