"""rollouts.jsonl of a run folder: sampled responses with their prompts, whose images lie beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

from lmm_r1.data import messages as data_messages
from lmm_r1.data.images import load_image
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_bytes_atomically
from lmm_r1.files.json_files import append_json_lines, count_field, number_field, read_json_lines, text_field

ROLLOUTS_FILE = "rollouts.jsonl"
IMAGES_FOLDER = "images"


@dataclass(frozen=True, kw_only=True)
class SampledResponse:
    """One sampled response with its reward, as a line holds it beside the prompt's `messages`."""

    step: int
    group: int
    """Responses to the same prompt within a step share this number."""
    response: str
    label: str
    reward: float | None
    scores: Mapping[str, float | None]
    """The named parts of the reward."""
    response_tokens: int
    truncated: bool
    weight_version: int | None = None
    """How many weight updates the engine had had; None in records of earlier versions."""
    held_out: bool = False
    """Whether it answers a row of the evaluation, and nothing was learnt from it."""
    said: tuple[tuple[str, str], ...] = ()
    """Of an episode, its turns behind the prompt as (role, text); empty for a single response."""
    end: str | None = None
    """How an episode has ended."""

    @classmethod
    def of(cls, sample: Sample, *, step: int, group: int, held_out: bool = False) -> SampledResponse:
        """Return what is kept of a sample that has its reward."""
        return cls(
            step=step,
            group=group,
            response=sample.response,
            label=sample.label,
            reward=sample.scored.reward,
            scores=sample.scored.parts,
            response_tokens=sample.generated_tokens,
            truncated=sample.truncated,
            weight_version=sample.weight_version,
            held_out=held_out,
            said=() if sample.played is None else tuple((one.role, one.text) for one in sample.played.said),
            end=None if sample.played is None else sample.played.end,
        )


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
class Rollout(SampledResponse):
    """A sampled response that was read, with its prompt."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutLog:
    """Where each rollout of a stage stands in its file: checked and indexed once, then read a few at a time.

    So a file larger than memory can be sampled.
    """

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

    def _read_at(self, stream: BinaryIO, index: int) -> Rollout:
        stream.seek(self.offsets[index])
        return _rollout(json.loads(stream.readline()), place=f"{self.path}, byte {self.offsets[index]}")


def append_rollout(
    folder: Path, response: SampledResponse, *, messages: Sequence[data_messages.Message], location: str
) -> list[dict[str, Any]]:
    """Append a response with its prompt to the file in a run folder, and return the prompt as it is written.

    The prompt's images are kept once each under images/; `location` names its row for messages.
    """
    written = [_written_message(message, folder=folder, location=location) for message in messages]
    append_json_lines(folder / ROLLOUTS_FILE, [{**asdict(response), "messages": written}])
    return written


def _written_message(message: data_messages.Message, *, folder: Path, location: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, data_messages.ImagePart):
            parts.append({"type": "image", "image": _written_image(part, folder=folder, location=location)})
        elif isinstance(part, data_messages.VideoPart):
            parts.append({"type": "video", "video": data_messages.describe_video(part)})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": message.role, "content": parts}


def _written_image(part: data_messages.ImagePart, *, folder: Path, location: str) -> str:
    buffer = BytesIO()
    load_image(part, location=location).save(buffer, format="PNG")
    name = f"{IMAGES_FOLDER}/{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.png"
    target = folder / name
    if not target.exists():
        write_bytes_atomically(target, data=buffer.getvalue())
    return name


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
        weight_version=(
            None if record.get("weight_version") is None else count_field(record, "weight_version", place=place)
        ),
        held_out=record.get("held_out") is True,
        said=_said(record.get("said", []), place=place),
        end=None if record.get("end") is None else text_field(record, "end", place=place),
    )


def _said(value: object, *, place: str) -> tuple[tuple[str, str], ...]:
    """The turns of an episode; records of earlier versions have none."""
    if isinstance(value, list) and all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(item, str) for item in turn) for turn in value
    ):
        return tuple((role, text) for role, text in value)
    raise UserError(f"{place}: said must be a list of [role, text], found {value!r:.80}")


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
