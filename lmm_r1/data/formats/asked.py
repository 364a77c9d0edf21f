"""The prompt of rows with responses, and what alpaca's and ShareGPT's rows put beside it."""

from __future__ import annotations

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
    """Return a form of a message that is equal for equal ones."""
    if not isinstance(turn, Mapping):
        return turn
    content = turn.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        parts: list[Any] = [{"type": "text", "text": content}]
    else:
        parts = [_part(part) for part in content]
    return turn.get("role"), parts


def _part(part: Any) -> Any:
    """Return a part without its empty fields, and with bytes where they lie in the row file."""
    if isinstance(part, StoredBytes):
        return part.read()
    if not isinstance(part, Mapping):
        return part
    return {name: _part(value) for name, value in part.items() if value is not None}


def _words(turn: Any) -> Any:
    written = _written(turn)
    if not isinstance(written, tuple):
        return written
    role, parts = written
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return role, "".join(str(text) for text in texts).replace("<image>", "").replace("<video>", "").strip()
