"""What stands between two turns of a model in one sequence of tokens: the end of its turn, a message, its next opening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from lmm_r1.data.messages import Message, TextPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit

# Two turns of the model that end in different tokens: what follows both alike belongs to the chat template.
_TURNS = ("Yes", "12")
_QUESTION = Message(role="user", parts=(TextPart("?"),))


def encode_turn(
    kit: LmmKit, processor: Any, message: Message, *, images: Sequence[Image.Image], prefill: str = ""
) -> EncodedPrompt:
    """Encode what comes between a turn that the model has generated and its next one, without encoding either again.

    The first tokens close the model's turn, as the chat template does; `without_end` leaves out what the model has
    written of them itself.

    Args:
        message: what is said to the model.
        images: those of the message, decoded.
        prefill: how the model's next turn begins.

    Raises:
        UserError: the message holds what the processor cannot take, or the chat template knows no such conversation.
    """
    first, other = ([_QUESTION, _answer(turn), message] for turn in _TURNS)
    encoded = kit.encode(processor, first, images=images, add_generation_prompt=True)
    ids, others = encoded.engine_token_ids, kit.render(processor, other, add_generation_prompt=True)
    shared = _shared_end(ids, others)
    start = len(ids) - shared
    if shared in (len(ids), len(others)) or encoded.token_ids[:start] != ids[:start]:
        raise UserError(
            "the checkpoint's chat template does not write a conversation turn by turn, so that a turn cannot be added "
            "to what the model has generated; train it on single turns"
        )
    begun = kit.tokenizer_of(processor)(prefill, add_special_tokens=False)["input_ids"] if prefill else []
    if not kit.placeholder_ids(processor).isdisjoint(begun):
        raise UserError(f"the turn that the model goes on from, {prefill!r}, holds a media token")
    return replace(encoded, token_ids=[*encoded.token_ids[start:], *begun], engine_token_ids=[*ids[start:], *begun])


def without_end(turn: EncodedPrompt, generated: Sequence[int]) -> EncodedPrompt:
    """Return an encoded turn without its first token where the model has generated it: the token that ends its own."""
    if not generated or generated[-1] != turn.token_ids[0]:
        return turn
    return replace(turn, token_ids=turn.token_ids[1:], engine_token_ids=turn.engine_token_ids[1:])


def _answer(text: str) -> Message:
    return Message(role="assistant", parts=(TextPart(text),))


def _shared_end(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both end in alike."""
    pairs = zip(reversed(ids), reversed(others), strict=False)
    return next((count for count, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others)))
