"""Text that stays text: what tools, services and pages show may spell special tokens, and none must come of it.

A mark, which a copy of the tokenizer knows as a special token, is written behind the first character of each: the
tokenizer then reads the pieces around it as the ordinary text that they are, and the mark's ids are left out again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from lmm_r1.data.messages import Message, TextPart
from lmm_r1.lmm_kits.encoding import any_of
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit

# Of Unicode's private use; nothing else depends on it, and a text that holds it is broken there, too.
MARK = "\ue000lmm-r1\ue001"


@dataclass(frozen=True, kw_only=True)
class MarkedProcessor:
    """A copy of a processor whose tokenizer knows the mark."""

    processor: Any
    mark_id: int

    def unmarked(self, encoded: EncodedPrompt) -> EncodedPrompt:
        """Return a prompt without the marks."""
        ids, engine_ids = (
            [token for token in tokens if token != self.mark_id]
            for tokens in (encoded.token_ids, encoded.engine_token_ids)
        )
        return replace(encoded, token_ids=ids, engine_token_ids=engine_ids)


# A process has one processor, its tests some more; a copy of a large vocabulary takes a second.
@lru_cache(maxsize=2)
def marked_processor(kit: LmmKit, processor: Any) -> MarkedProcessor:
    """Return a processor's copy that knows the mark; it is made once."""
    from tokenizers import AddedToken

    own = copy.deepcopy(processor)
    tokenizer = kit.tokenizer_of(own)
    tokenizer.add_tokens([AddedToken(MARK, special=True, normalized=False)], special_tokens=True)
    return MarkedProcessor(processor=own, mark_id=tokenizer.convert_tokens_to_ids(MARK))


@lru_cache(maxsize=2)
def _special_texts(kit: LmmKit, processor: Any) -> re.Pattern[str]:
    added = kit.tokenizer_of(processor).added_tokens_decoder.values()
    special = any_of({MARK, *(token.content for token in added if token.special)})
    return re.compile(f"{special.pattern}|{kit.media_texts(processor).pattern}")


def special_ids(kit: LmmKit, processor: Any) -> frozenset[int]:
    """Return the ids of all special tokens, placeholders included."""
    added = kit.tokenizer_of(processor).added_tokens_decoder.items()
    return kit.placeholder_ids(processor) | {number for number, token in added if token.special}


def with_marks(kit: LmmKit, processor: Any, message: Message) -> Message:
    """Return a message whose texts have marks where they spell special tokens; the message itself where they do not."""
    special = _special_texts(kit, processor)
    parts = tuple(_marked(part, special) if isinstance(part, TextPart) else part for part in message.parts)
    return message if parts == message.parts else replace(message, parts=parts)


def without_texts(message: Message) -> Message:
    """Return a message of as many parts, whose texts are harmless."""
    return replace(
        message, parts=tuple(TextPart(".") if isinstance(part, TextPart) else part for part in message.parts)
    )


def specials_of(token_ids: Iterable[int], *, special: Collection[int]) -> list[int]:
    """Return the special tokens of a sequence, in their order."""
    return [token for token in token_ids if token in special]


def _marked(part: TextPart, special: re.Pattern[str]) -> TextPart:
    pieces, start = [], 0
    while found := special.search(part.text, start):
        pieces.append(part.text[start : found.start() + 1])
        start = found.start() + 1
    return TextPart(MARK.join([*pieces, part.text[start:]])) if pieces else part
