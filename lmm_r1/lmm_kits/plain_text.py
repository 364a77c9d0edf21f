"""Text that stays text: rows, users, tools and policies may spell special tokens, which must not become such tokens.

A mark is inserted after the first character of each such spelling. A copy of the tokenizer removes marks, but only after it
has searched for special tokens. The rest is tokenized as if the tokenizer had no special tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jinja2

from lmm_r1.data.messages import Message, Part, TextPart, merged_texts
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import any_of
from remote_rm.responses import TAGS

if TYPE_CHECKING:
    from lmm_r1.lmm_kits.kit import LmmKit, Processor

# From Unicode's private use area. A text that holds this mark itself is marked again inside it.
MARK = "\ue000lmm-r1\ue001"
# A special token of the copy, which marks the beginning and the end of a text.
BORDER = "\ue000lmm-r1 border\ue001"
_PROBE = "lmm-r1"


@dataclass(kw_only=True)
class _Known:
    """Cached results for a tokenizer."""

    control: re.Pattern[str]
    control_ids: frozenset[int]
    takes_system: bool
    """Whether its chat template writes system turns."""
    copied: Processor | None = None
    """A copy of its processor whose tokenizer removes marks, made when it is first needed."""


_KNOWN: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def control_texts(kit: LmmKit, processor: Processor) -> re.Pattern[str]:
    """Return a pattern of texts that only the chat template may write: special tokens, media marks and tokens of turns.

    Special tokens are those that the tokenizer flags as special. Tokens of turns are those that the template writes next to
    a message, flagged or not. Tokens that a model writes as words of its answers are not included.
    """
    return _known(kit, processor).control


def as_text(kit: LmmKit, processor: Processor, messages: Sequence[Message]) -> tuple[Processor, Sequence[Message]]:
    """Return a processor and messages with which the texts stay text: the arguments, or a copy and marked messages.

    Raises UserError if the tokenizer cannot read such text.
    """
    control = control_texts(kit, processor)
    messages = with_system_placed(kit, processor, messages)
    marked = [_marked_message(message, control) for message in messages]
    if all(one is other for one, other in zip(marked, messages, strict=True)):
        return processor, messages
    return _copied(kit, processor), marked


def as_plain_prompt(kit: LmmKit, processor: Processor, message: Message) -> tuple[Processor, str]:
    """Return the processor for a prompt without the chat template, and the prompt's text.

    The prompt template of a run keeps its special tokens, and so does a text without a template. A row's text in a template
    stays text. Raises UserError as `as_text` does.
    """
    control = control_texts(kit, processor)
    parts = [part for part in message.parts if isinstance(part, TextPart)]
    text, marked = "".join(part.text for part in parts), "".join(_filled(part, control) for part in parts)
    return (processor, text) if marked == text else (_copied(kit, processor), marked)


def _filled(part: TextPart, control: re.Pattern[str]) -> str:
    """Return a plain prompt with marks in the row's own text."""
    if part.template == "{}":
        return part.text
    around = part.template.split("{}")
    length = (len(part.text) - sum(map(len, around))) // (len(around) - 1)
    own = part.text[len(around[0]) : len(around[0]) + length]
    return part.template.replace("{}", _marked(own, control))


def as_bordered_text(
    kit: LmmKit, processor: Processor, messages: Sequence[Message]
) -> tuple[Processor, Sequence[Message], int]:
    """Return a processor and messages with a border before and after each text next to media, and the border's id.

    Only the model's turns have borders.
    """
    control, own = control_texts(kit, processor), _copied(kit, processor)
    messages = with_system_placed(kit, processor, messages)
    bordered = [_bordered(_marked_message(message, control)) for message in messages]
    return own, bordered, kit.tokenizer_of(own).convert_tokens_to_ids(BORDER)


def with_system_placed(kit: LmmKit, processor: Processor, messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages whose system turn opens the user's first turn if the chat template refuses or drops such turns."""
    roles = [message.role for message in messages[:2]]
    if roles != ["system", "user"] or _known(kit, processor).takes_system:
        return messages
    system, user, *others = messages
    parts = merged_texts((*system.parts, TextPart("\n\n"), *user.parts))
    return [replace(user, parts=parts), *others]


def control_ids(kit: LmmKit, processor: Processor) -> frozenset[int]:
    """Return the ids of the tokens that `control_texts` matches, which text never produces."""
    return _known(kit, processor).control_ids


def text_ids(kit: LmmKit, processor: Processor, text: str) -> list[int]:
    """Return the ids of a text without control tokens; raises UserError as `as_text` does."""
    marked = _marked(text, control_texts(kit, processor))
    reading = processor if marked == text else _copied(kit, processor)
    return kit.tokenizer_of(reading)(marked, add_special_tokens=False)["input_ids"]


def _texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message; a template may join adjacent parts, so they are joined here."""
    for is_text, parts in groupby(message.parts, key=lambda part: isinstance(part, TextPart)):
        if is_text:
            yield "".join(part.text.strip() for part in parts if isinstance(part, TextPart))


def _marked_message(message: Message, control: re.Pattern[str]) -> Message:
    """Return a message with marks in its texts, or the same message if they spell no special tokens."""
    if not any(map(control.search, _texts(message))):
        return message
    parts: list[Part] = []
    after_text = False
    for part in message.parts:
        if isinstance(part, TextPart):
            text = _marked(part.text, control)
            # Two adjacent parts can spell a token together, also if a template strips spaces between them.
            start = len(text) - len(text.lstrip())
            parts.append(TextPart(f"{text[:start]}{MARK}{text[start:]}" if after_text and text.strip() else text))
        else:
            parts.append(part)
        after_text = isinstance(part, TextPart)
    return replace(message, parts=tuple(parts))


def _marked(text: str, control: re.Pattern[str]) -> str:
    pieces, start = [], 0
    while found := control.search(text, start):
        pieces.append(text[start : found.start() + 1])
        start = found.start() + 1
    return MARK.join([*pieces, text[start:]])


def _bordered(message: Message) -> Message:
    """Return a model's turn with borders at its texts if it also has images or videos; other messages stay as they are."""
    if message.role != "assistant" or all(isinstance(part, TextPart) for part in message.parts):
        return message
    parts = tuple(_with_borders(part) if isinstance(part, TextPart) else part for part in message.parts)
    return replace(message, parts=parts)


def _with_borders(part: TextPart) -> TextPart:
    """Return a text with a border at each end; spaces outside the borders stay, so that a template can strip them."""
    inner = part.text.strip()
    return TextPart(part.text.replace(inner, f"{BORDER}{inner}{BORDER}", 1)) if inner else part


def _known(kit: LmmKit, processor: Processor) -> _Known:
    tokenizer = kit.tokenizer_of(processor)
    if tokenizer not in _KNOWN:
        turns, takes_system = _turn_tokens(kit, processor)
        control = _control(kit, processor, turns)
        added = tokenizer.added_tokens_decoder.items()
        ids = frozenset(number for number, token in added if control.fullmatch(token.content))
        _KNOWN[tokenizer] = _Known(control=control, control_ids=ids, takes_system=takes_system)
    return _KNOWN[tokenizer]


def _control(kit: LmmKit, processor: Processor, turns: set[str]) -> re.Pattern[str]:
    tokenizer = kit.tokenizer_of(processor)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {*tokenizer.all_special_tokens, *turns}
    # Words of the model's answers, even if the tokenizer flags them.
    special -= {*TAGS, *kit.spoken_tokens, *tokenizer.convert_ids_to_tokens(sorted(kit.spoken_end_ids(tokenizer)))}
    # A mark does not fit inside a single character.
    texts = any_of({MARK, BORDER, *(text for text in special if len(text) > 1)})
    return re.compile(f"{texts.pattern}|{kit.media_texts(processor).pattern}")


def _turn_tokens(kit: LmmKit, processor: Processor) -> tuple[set[str], bool]:
    """Return the tokens that the chat template writes next to a message or at the start of a generated turn.

    Not all tokenizers flag them as special. The second value is whether it writes a system turn.
    """
    added = [token.content for token in kit.tokenizer_of(processor).added_tokens_decoder.values()]
    token = any_of(text for text in added if text.strip())
    at_end, at_start = re.compile(rf"({token.pattern})\s*\Z"), re.compile(rf"\s*({token.pattern})")
    found, written = set(), ""
    for asked in ([_said("user", _PROBE)], [_said("system", _PROBE), _said("user", "?")]):
        try:
            closed, opened = (kit.chat_text(processor, asked, add_generation_prompt=opens) for opens in (False, True))
        except (UserError, jinja2.TemplateError):
            # The template refuses system turns.
            written = ""
            continue
        written = closed
        before, _, after = closed.partition(_PROBE)
        places = (at_end.search(before), at_start.match(after), at_start.match(opened.removeprefix(closed)))
        found |= {place[1] for place in places if place is not None}
    return found, _PROBE in written


def _said(role: str, text: str) -> Message:
    return Message(role=role, parts=(TextPart(text),))


def _copied(kit: LmmKit, processor: Processor) -> Processor:
    """Return a copy of the processor whose tokenizer removes marks, made once: a large vocabulary takes seconds."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    known = _known(kit, processor)
    if known.copied is not None:
        return known.copied
    if not kit.tokenizer_of(processor).is_fast:
        raise UserError(
            "a text spells a special token of this checkpoint, whose tokenizer has no fast form and cannot read that as text; "
            "take it out of the text"
        )
    known.copied = copy.deepcopy(processor)
    tokenizer = kit.tokenizer_of(known.copied)
    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder.values()
    if any(token.normalized and known.control.fullmatch(token.content) for token in added):
        # The tokenizer also searches for such tokens after the normalization.
        splits = [pre_tokenizers.Split(MARK, behavior="removed"), *_given(backend.pre_tokenizer)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Replace(MARK, ""), *_given(backend.normalizer)])
    tokenizer.add_tokens([AddedToken(BORDER, special=True, normalized=False)], special_tokens=True)
    return known.copied


def _given(step: Any) -> list[Any]:
    return [] if step is None else [step]
