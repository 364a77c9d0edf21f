"""What stands between two turns of a model in one sequence of tokens: the end of its turn, a message, its next opening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jinja2
from PIL import Image

from lmm_r1.data.messages import Message, TextPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.plain_text import text_ids

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
        message: what is said to the model. What its text spells of special tokens stays text.
        images: those of the message, decoded.
        prefill: how the model's next turn begins, which is text, too.

    Raises:
        UserError: the message holds what the processor cannot take, or the chat template knows no such conversation.
    """
    try:
        turn = _between_turns(kit, processor, message, images=images)
    except jinja2.TemplateError as error:
        raise UserError(
            f"the checkpoint's chat template refuses a turn of the role {message.role} behind one of the model ({error}); "
            "let the environment answer as user"
        ) from error
    begun = text_ids(kit, processor, prefill) if prefill else []
    return replace(turn, token_ids=[*turn.token_ids, *begun], engine_token_ids=[*turn.engine_token_ids, *begun])


def without_end(turn: EncodedPrompt, generated: Sequence[int]) -> EncodedPrompt:
    """Return an encoded turn without its first token where the model has generated it: the token that ends its own."""
    if not generated or generated[-1] != turn.token_ids[0]:
        return turn
    return replace(turn, token_ids=turn.token_ids[1:], engine_token_ids=turn.engine_token_ids[1:])


def _between_turns(kit: LmmKit, processor: Any, message: Message, *, images: Sequence[Image.Image]) -> EncodedPrompt:
    first, other = (_behind(turn, message) for turn in _TURNS)
    encoded = kit.encode(processor, first, images=images, add_generation_prompt=True)
    ids, others = encoded.engine_token_ids, kit.render(processor, other, add_generation_prompt=True)
    shared = _shared_end(ids, others)
    start = len(ids) - shared
    if shared in (len(ids), len(others)) or encoded.token_ids[:start] != ids[:start]:
        raise UserError(
            "the checkpoint's chat template does not write a conversation turn by turn, so that a turn cannot be added "
            "to what the model has generated; train it on single turns"
        )
    return replace(encoded, token_ids=encoded.token_ids[start:], engine_token_ids=ids[start:])


def _behind(turn: str, message: Message) -> list[Message]:
    """Return a conversation in which a message stands behind a turn of the model."""
    return [_QUESTION, Message(role="assistant", parts=(TextPart(turn),)), message]


def _shared_end(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both end in alike."""
    pairs = zip(reversed(ids), reversed(others), strict=False)
    return next((count for count, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others)))
