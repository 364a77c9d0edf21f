"""Which tokens of a conversation the loss takes: those of the model's turns, less all that images and videos expand to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.checkpoint import bordered_ids
from lmm_r1.lmm_kits.encoding import placed
from lmm_r1.lmm_kits.plain_text import control_ids

# How SentencePiece writes a space; some tokenizers put one before each piece of text.
_SPACE = "▁"
# Tokens at the end of a turn that messages show.
_SHOWN_END = 4


class RewrittenHistory(UserError):
    """A chat template writes a turn in another way once more turns follow."""


def check_turns(row: Row, turns: Sequence[int], *, outline: EncodedPrompt, kit: LmmKit, processor: Any) -> None:
    """Raise UserError where `mask_of_turns` cannot tell those turns of a conversation apart."""
    for turn in turns:
        _span(row, turn=turn, kit=kit, processor=processor, whole=outline)


def mask_of_turns(
    row: Row, turns: Sequence[int], *, encoded: EncodedPrompt, kit: LmmKit, processor: Any
) -> list[bool]:
    """Return which tokens of an encoded conversation those turns consist of, their end tokens included.

    Of a turn with images or videos these are the tokens of its texts: not what a medium expands to (placeholders, markers,
    times of frames, line breaks), and not what the template puts next to it.

    Raises UserError where the chat template does not let turns, or texts and media, be told apart.
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
    """The turns of a conversation with media, in its expanded ids."""

    row: Row
    encoded: EncodedPrompt
    kit: LmmKit
    processor: Any

    @cached_property
    def _media(self) -> frozenset[int]:
        return self.kit.media_ids(self.processor)

    @cached_property
    def _anchors(self) -> frozenset[int]:
        """Tokens that the chat template alone writes: the same ones, in the same order, however media are expanded."""
        end = self.kit.tokenizer_of(self.processor).eos_token_id
        return (control_ids(self.kit, self.processor) | {end}) - self._media

    @cached_property
    def _bordered(self) -> tuple[list[int], int]:
        return bordered_ids(self.row, kit=self.kit, processor=self.processor)

    def kept(self, turn: int, span: tuple[int, int]) -> tuple[int, list[bool]]:
        """Return where a turn begins in the expanded ids, and for each of its tokens whether the loss takes it.

        Args:
            span: from where to where it goes in the ids with one placeholder per medium.
        """
        start, end = span
        ids, whole = self.encoded.engine_token_ids, self.encoded.token_ids
        last = self._place(end, turn=turn, among=whole)
        # A template may write media where it otherwise ends the line that opens a turn.
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
        """Return which tokens of a turn are its text's, as its ids with borders tell; None where they are not the same text."""
        flags = self._kept_with_borders(known, border=border)
        known = [token for token in known if token != border]
        if known == token_ids:
            return flags
        # Next to a border, text may have been cut into tokens otherwise.
        for left_out in ("", _SPACE):
            pieces, others = (self._pieces(ids, left_out=left_out) for ids in (known, token_ids))
            if "".join(pieces) == "".join(others):
                by_character = [flag for piece, flag in zip(pieces, flags, strict=True) for _ in piece]
                return _by_token(by_character, others)
        return None

    def _kept_with_borders(self, known: Sequence[int], *, border: int) -> list[bool]:
        """Return for each token but the borders whether it is kept: outside of texts, only where no medium stands."""
        flags: list[bool] = []
        stretch: list[int] = []
        inside = False
        for token in [*known, border]:
            if token != border:
                stretch.append(token)
                continue
            flags += [inside or self._media.isdisjoint(stretch)] * len(stretch)
            stretch, inside = [], not inside
        # The end token stands behind a medium where the turn ends in one.
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
    """Return for each token whether all of its characters are kept; of none, whether those next to it are."""
    flags, start = [], 0
    for piece in pieces:
        end = start + len(piece)
        flags.append(all(by_character[start:end] if piece else by_character[max(0, start - 1) : start + 1]))
        start = end
    return flags


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
