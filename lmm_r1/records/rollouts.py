"""The sampled rollouts of one stage: its rollouts.jsonl is checked and indexed once, and read a few at a time."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmm_r1.errors import UserError
from lmm_r1.files.json_lines import read_json_lines
from lmm_r1.files.json_object import count_field, number_field, text_field


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a message."""

    kind: Literal["text", "image"]
    value: str
    """The text, or where the image lies: a path relative to the stage's folder, or a data URI."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled response with its prompt and its reward."""

    step: int
    group: int
    """Responses to the same prompt within a step share this number."""
    messages: tuple[Message, ...]
    response: str
    label: str
    reward: float | None
    scores: dict[str, float | None]
    """The named parts of the reward."""
    response_tokens: int
    truncated: bool


@dataclass(frozen=True, kw_only=True)
class RolloutLog:
    """Where each rollout of a stage stands in its file, so that a file larger than memory can be sampled."""

    path: Path
    steps: tuple[int, ...] = ()
    """The step of each rollout, in the order of the file."""
    offsets: tuple[int, ...] = ()
    torn_lines: int = 0

    def __len__(self) -> int:
        return len(self.steps)

    def read(self, indices: Iterable[int]) -> list[Rollout]:
        """Return the rollouts at these positions of the file, in the order asked for."""
        indices = list(indices)
        if not indices:
            return []
        with self.path.open("rb") as stream:
            return [self._read_at(stream, index) for index in indices]

    def _read_at(self, stream, index: int) -> Rollout:
        stream.seek(self.offsets[index])
        return _rollout(json.loads(stream.readline()), place=f"{self.path}, byte {self.offsets[index]}")


def read_rollouts(path: Path) -> RolloutLog:
    """Return the index of a rollout file, empty if there is none; a malformed line is a UserError naming it."""
    if not path.exists():
        return RolloutLog(path=path)
    steps: list[int] = []
    offsets: list[int] = []
    torn = 0
    for line in read_json_lines(path):
        if line.record is None:
            torn += 1
            continue
        steps.append(_rollout(line.record, place=line.place).step)
        offsets.append(line.offset)
    return RolloutLog(path=path, steps=tuple(steps), offsets=tuple(offsets), torn_lines=torn)


def _rollout(record: dict[str, object], *, place: str) -> Rollout:
    scores = record.get("scores", {})
    if not isinstance(scores, dict):
        raise UserError(f"{place}: scores must be an object of numbers by name, found {scores!r}")
    return Rollout(
        step=count_field(record, "step", place=place),
        group=count_field(record, "group", place=place),
        messages=_messages(record.get("messages"), place=place),
        response=text_field(record, "response", place=place),
        label=text_field(record, "label", place=place),
        reward=number_field(record, "reward", place=place),
        scores={name: number_field(scores, name, place=f"{place}, scores") for name in scores},
        response_tokens=count_field(record, "response_tokens", place=place),
        truncated=record.get("truncated") is True,
    )


def _messages(value: object, *, place: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UserError(f"{place}: messages must be a list of objects with role and content")
    return tuple(_message(message, place=f"{place}, message {number}") for number, message in enumerate(value, 1))


def _message(message: dict[str, object], *, place: str) -> Message:
    role = text_field(message, "role", place=place)
    content = message.get("content")
    if isinstance(content, str):
        return Message(role=role, parts=(Part(kind="text", value=content),))
    if not isinstance(content, list):
        raise UserError(f"{place}: content must be a string or a list of parts, found {type(content).__name__}")
    return Message(role=role, parts=tuple(_part(part, place=place) for part in content))


def _part(part: object, *, place: str) -> Part:
    if not isinstance(part, dict):
        raise UserError(f"{place}: a content part must be an object with a type, found {type(part).__name__}")
    kind = text_field(part, "type", place=place)
    if kind == "text":
        return Part(kind="text", value=text_field(part, "text", place=place))
    if kind == "image":
        return Part(kind="image", value=text_field(part, "image", place=place))
    return Part(kind="text", value=f"[{kind}]")
