"""The prompt of rows with responses, and the `input` that alpaca's rows put after it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmm_r1.data.formats.chats import MESSAGES, chat_message, with_surroundings
from lmm_r1.data.formats.problems import media_first
from lmm_r1.data.formats.row_format import Column, Columns, is_empty
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
    prompt = columns.prompt(*held_prompts(columns, names))
    if columns.names.prompt != "input" and (more := columns.text("input")) is not None:
        if not isinstance(prompt, str):
            columns.fail(
                f'"input" goes with a prompt that is text; put it into "{columns.prompt_column}", and empty it'
            )
        prompt = f"{prompt}\n{more}"
    return with_surroundings(media_first(prompt, images), columns=columns)


def held_prompts(columns: Columns, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns among these of which one is to hold the prompt: no conversation where there is another one.

    Datasets repeat the prompt in a conversation with a response. Raises UserError for a conversation that begins otherwise.
    """
    held = [name for name in names if not is_empty(columns.record.get(name))]
    prompt = next((name for name in held if name not in CONVERSATIONS), None)
    if prompt is None or columns.names.prompt is not None:
        return names
    for name in held:
        turns = columns.record[name]
        if name in CONVERSATIONS and not _begins(turns, columns.record[prompt]):
            columns.fail(
                f'both "{prompt}" and "{name}" are given, and "{name}" does not begin with it; empty one of them'
            )
    return tuple(name for name in names if name not in CONVERSATIONS)


def _begins(turns: Any, prompt: Any) -> bool:
    """Say whether a conversation begins with a prompt, but for a system turn."""
    if isinstance(turns, str) or not isinstance(turns, Sequence):
        return False
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(asked, Sequence):
        return False
    said, wanted = (
        [turn for turn in map(chat_message, part) if not isinstance(turn, Mapping) or turn.get("role") != "system"]
        for part in (turns, asked)
    )
    return len(said) >= len(wanted) and all(map(same_words, said, wanted))


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
