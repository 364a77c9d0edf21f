"""The prompt of rows with responses, and what alpaca's and ShareGPT's rows put beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmm_r1.data.formats.chats import MESSAGES, chat_message
from lmm_r1.data.formats.problems import media_first
from lmm_r1.data.formats.row_format import Column, Columns, filled
from lmm_r1.data.stored_bytes import StoredBytes

PROMPTS = ("prompt", "question", "query", "instruction")
CONVERSATIONS = (*MESSAGES, "conversations")
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
_TAGS = re.compile("(<image>|<video>)")


def prompt_of(columns: Columns, *, images: Column, names: tuple[str, ...] = (*PROMPTS, *CONVERSATIONS)) -> Any:
    """Return the prompt in one of these columns: alpaca's `input` behind it, `system` and `history` in front.

    Raises:
        UserError: there is none, or what stands beside it cannot be put into it.
    """
    prompt = columns.prompt(*names)
    more = columns.take("input").value if columns.names.prompt != "input" else None
    if isinstance(prompt, str) and isinstance(more, str) and more.strip():
        prompt = f"{prompt}\n{more}"
    return with_surroundings(media_first(prompt, images), columns=columns)


def with_surroundings(prompt: Any, *, columns: Columns) -> Any:
    """Return a prompt with the columns `system` and `history` in front of it, in chat messages if there are any."""
    if columns.take("tools").value:
        columns.fail('the field "tools" is not read; write the tools into a system turn, and leave the field out')
    before = [*_system(columns), *_history(columns)]
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        return [*before, *map(chat_message, prompt)]
    return [*before, {"role": "user", "content": prompt}] if before else prompt


def _system(columns: Columns) -> list[dict[str, Any]]:
    system = columns.take("system").value
    return [{"role": "system", "content": system}] if filled(system) else []


def _history(columns: Columns) -> list[dict[str, Any]]:
    """Return the earlier turns of alpaca's rows: pairs of what was asked and answered."""
    rounds = columns.take("history").value or []
    turns: list[dict[str, Any]] = []
    for number, entry in enumerate(rounds if isinstance(rounds, Sequence) else [rounds], start=1):
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2:
            columns.fail(f'"history" entry {number} must be a list of two texts, what was asked and what was answered')
        turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), entry, strict=True)]
    return turns


def same_turn(one: Any, other: Any) -> bool:
    """Say whether two chat messages are the same, however they write a text and whatever fields they leave empty."""
    return _written(one) == _written(other)


def same_words(one: Any, other: Any) -> bool:
    """Say whether two chat messages say the same, images and videos aside."""
    return _words(one) == _words(other)


def _written(turn: Any) -> Any:
    """Return a form of a message that is equal for equal ones: a tag is an image part without a source."""
    if not isinstance(turn, Mapping):
        return turn
    role, content = turn.get("role"), turn.get("content")
    if isinstance(content, str):
        pieces = [content] if role == "assistant" else _TAGS.split(content)
        parts: list[Any] = [
            {"type": piece.strip("<>")} if place % 2 else piece.strip() for place, piece in enumerate(pieces)
        ]
        return role, [part for part in parts if part]
    if not isinstance(content, Sequence):
        return role, content
    return role, [written for part in content if (written := _part(part))]


def _part(part: Any) -> Any:
    """Return a part without its empty fields, without blanks around its text, and with bytes that lie in the row file."""
    if isinstance(part, StoredBytes):
        return part.read()
    if not isinstance(part, Mapping):
        return part
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return text.strip()
    return {name: _part(value) for name, value in part.items() if value is not None}


def _words(turn: Any) -> Any:
    written = _written(turn)
    if not isinstance(written, tuple):
        return written
    role, parts = written
    return role, [part for part in parts if isinstance(part, str)] if isinstance(parts, list) else parts
