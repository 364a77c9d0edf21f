"""Conversations of a run folder: messages of text and images, whose files lie under images/, and the turns of episodes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, cast, get_args

from lmm_r1.data import messages as data_messages
from lmm_r1.data.images import load_image
from lmm_r1.data.sample import Said
from lmm_r1.data.turn_details import CallEnd, CallOutcome, Cut, CutImage
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_bytes_atomically
from lmm_r1.files.json_files import LARGEST_COUNT, LARGEST_NUMBER, count_field, number_field, text_field

IMAGES_FOLDER = "images"
_MARK = "<image>"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a message."""

    kind: Literal["text", "image"]
    value: str
    """The text, or where the image lies: a path relative to the stage's folder, or a data URI."""
    cut: Cut | None = None
    """Where the image was cut out of another one of the episode."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Turn(Message):
    """One turn of an episode, the policy's or the environment's."""

    calls: tuple[CallOutcome, ...] = ()
    """What became of the calls in a turn of the policy."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """The parts of the reward that a turn of the policy has earned."""


def write_message(message: data_messages.Message, *, folder: Path, location: str) -> dict[str, Any]:
    """Return a message as it stands in a record; its images are kept once each under images/ of `folder`."""
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, data_messages.ImagePart):
            parts.append({"type": "image", "image": _written_image(part, folder=folder, location=location)})
        elif isinstance(part, data_messages.VideoPart):
            parts.append({"type": "video", "video": data_messages.describe_video(part)})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": message.role, "content": parts}


def keep_turns(said: Sequence[Said], *, folder: Path, location: str) -> tuple[Turn, ...]:
    """Return the turns of an episode as they are kept; their pictures are written as those of messages are."""
    return tuple(
        Turn(
            role=one.role,
            parts=_kept_parts(one, folder=folder, location=location),
            calls=one.calls,
            rewards=dict(one.rewards),
        )
        for one in said
    )


def turn_record(turn: Turn) -> dict[str, Any]:
    """Return a turn as it stands in a record, without what it does not have."""
    content: list[dict[str, Any]] = []
    for part in turn.parts:
        cut = {} if part.cut is None else {"cut": asdict(part.cut)}
        content.append({"type": part.kind, part.kind: part.value, **cut})
    calls = {"calls": [asdict(call) for call in turn.calls]} if turn.calls else {}
    rewards = {"rewards": dict(turn.rewards)} if turn.rewards else {}
    return {"role": turn.role, "content": content, **calls, **rewards}


def _kept_parts(said: Said, *, folder: Path, location: str) -> tuple[Part, ...]:
    pictures = [
        Part(
            kind="image",
            value=_written_image(image, folder=folder, location=location),
            cut=image.cut if isinstance(image, CutImage) else None,
        )
        for image in said.images
    ]
    texts = said.text.split(_MARK)
    if len(texts) != len(pictures) + 1:
        # Its pictures are not kept, or it writes the mark as text, too: which of them stand for pictures, nobody knows.
        texts = [said.text] + [""] * len(pictures)
    parts: list[Part] = []
    for place, text in enumerate(texts):
        parts += pictures[place - 1 : place] if place else []
        parts += [Part(kind="text", value=text)] if text else []
    return tuple(parts)


def _written_image(part: data_messages.ImagePart, *, folder: Path, location: str) -> str:
    buffer = BytesIO()
    load_image(part, location=location).save(buffer, format="PNG")
    name = f"{IMAGES_FOLDER}/{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.png"
    target = folder / name
    if not target.exists():
        write_bytes_atomically(target, data=buffer.getvalue())
    return name


def read_messages(value: object, *, place: str) -> tuple[Message, ...]:
    """Return the messages of a record; raises UserError, with its place, where they are malformed."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UserError(f"{place}: messages must be a list of objects with role and content")
    return tuple(_message(message, place=f"{place}, message {number}") for number, message in enumerate(value, 1))


def read_turns(value: object, *, place: str) -> tuple[Turn, ...]:
    """Return the turns of an episode; raises as `read_messages` does. Earlier versions wrote pairs of role and text."""
    if not isinstance(value, list):
        raise UserError(f"{place}: said must be a list of turns, found {value!r:.80}")
    return tuple(_turn(turn, place=f"{place}, turn {number}") for number, turn in enumerate(value, 1))


def _turn(value: object, *, place: str) -> Turn:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value):
        role, text = value
        return Turn(role=role, parts=(Part(kind="text", value=text),))
    if not isinstance(value, dict):
        raise UserError(f"{place}: a turn must be an object with role and content, found {value!r:.80}")
    message = _message(value, place=place)
    calls, rewards = value.get("calls", []), value.get("rewards", {})
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{place}: calls must be a list of objects, found {calls!r:.80}")
    if not isinstance(rewards, dict):
        raise UserError(f"{place}: rewards must be an object of numbers by name, found {rewards!r:.80}")
    return Turn(
        role=message.role,
        parts=message.parts,
        calls=tuple(_call(call, place=place) for call in calls),
        rewards={name: number_field(rewards, name, place=f"{place}, rewards") for name in rewards},
    )


def _call(record: dict[str, object], *, place: str) -> CallOutcome:
    outcome = record.get("outcome")
    if outcome not in get_args(CallEnd):
        raise UserError(
            f"{place}: the outcome of a call must be one of {', '.join(get_args(CallEnd))}, found {outcome!r}"
        )
    return CallOutcome(
        tool=text_field(record, "tool", place=place),
        outcome=cast(CallEnd, outcome),
        problem=text_field(record, "problem", place=place),
    )


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
        cut = None if part.get("cut") is None else _cut(part["cut"], place=place)
        return Part(kind="image", value=text_field(part, "image", place=place), cut=cut)
    return Part(kind="text", value=f"[{kind}]")


def _cut(record: object, *, place: str) -> Cut:
    if not isinstance(record, dict):
        raise UserError(f"{place}: cut must be an object with picture, name, box and size, found {record!r:.80}")
    left, upper, right, lower = _whole(record, "box", count=4, place=place)
    width, height = _whole(record, "size", count=2, place=place)
    if not (0 <= left < right <= width and 0 <= upper < lower <= height):
        raise UserError(f"{place}: the box {record['box']} does not lie in a picture of {width} x {height} pixels")
    return Cut(
        picture=count_field(record, "picture", place=place),
        name=text_field(record, "name", place=place),
        box=(left, upper, right, lower),
        size=(width, height),
        keypoint=None if record.get("keypoint") is None else _point(record["keypoint"], place=place),
    )


def _whole(record: dict[str, object], key: str, *, count: int, place: str) -> list[int]:
    value = record.get(key)
    if isinstance(value, list) and len(value) == count:
        if all(type(item) is int and 0 <= item <= LARGEST_COUNT for item in value):
            return value
    raise UserError(f"{place}: {key} must be a list of {count} whole numbers from 0 up, found {value!r:.80}")


def _point(value: object, *, place: str) -> tuple[float, float]:
    if isinstance(value, list) and len(value) == 2:
        if all(type(item) in (int, float) and abs(item) <= LARGEST_NUMBER for item in value):
            return float(value[0]), float(value[1])
    raise UserError(f"{place}: keypoint must be a list of two numbers, found {value!r:.80}")
