"""rollouts.jsonl of a run folder: sampled responses and episodes with their prompts; images are files next to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args

from lmm_r1.data import messages as data_messages
from lmm_r1.data.images import load_image
from lmm_r1.data.sample import CallEnd, CallOutcome, Cut, CutImage, EpisodeEnd, Said, Sample
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_bytes_atomically
from lmm_r1.files.json_files import (
    LARGEST_COUNT,
    LARGEST_NUMBER,
    append_json_lines,
    count_field,
    number_field,
    read_json_lines,
    text_field,
)

IMAGES_FOLDER = "images"
_MARK = "<image>"


@dataclass(frozen=True, kw_only=True)
class RecordedPart:
    kind: Literal["text", "image"]
    value: str
    """The text, or the image: a path relative to the stage's folder, or a data URI."""
    cut: Cut | None = None
    """For an image that was cut out of another one of the episode."""


@dataclass(frozen=True, kw_only=True)
class RecordedMessage:
    """One turn of a conversation."""

    role: str
    parts: tuple[RecordedPart, ...]


@dataclass(frozen=True, kw_only=True)
class RecordedTurn(RecordedMessage):
    """One turn of an episode, the policy's or the environment's."""

    calls: tuple[CallOutcome, ...] = ()
    rewards: Mapping[str, float | None] = field(default_factory=dict)


def write_message(message: data_messages.Message, *, folder: Path, location: str) -> dict[str, Any]:
    """Return a message as a record; each image is stored once under images/ of `folder`."""
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, data_messages.ImagePart):
            parts.append({"type": "image", "image": _written_image(part, folder=folder, location=location)})
        elif isinstance(part, data_messages.VideoPart):
            parts.append({"type": "video", "video": data_messages.describe_video(part)})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": message.role, "content": parts}


def keep_turns(said: Sequence[Said], *, folder: Path, location: str) -> tuple[RecordedTurn, ...]:
    """Return the turns of an episode in the form for records, with their pictures written like those of messages."""
    return tuple(
        RecordedTurn(
            role=one.role,
            parts=_kept_parts(one, folder=folder, location=location),
            calls=one.calls,
            rewards=dict(one.rewards),
        )
        for one in said
    )


def turn_record(turn: RecordedTurn) -> dict[str, Any]:
    """Return a turn as a record, without empty fields."""
    content: list[dict[str, Any]] = []
    for part in turn.parts:
        cut = {} if part.cut is None else {"cut": asdict(part.cut)}
        content.append({"type": part.kind, part.kind: part.value, **cut})
    calls = {"calls": [asdict(call) for call in turn.calls]} if turn.calls else {}
    rewards = {"rewards": dict(turn.rewards)} if turn.rewards else {}
    return {"role": turn.role, "content": content, **calls, **rewards}


def _kept_parts(said: Said, *, folder: Path, location: str) -> tuple[RecordedPart, ...]:
    pictures = [
        RecordedPart(
            kind="image",
            value=_written_image(image, folder=folder, location=location),
            cut=image.cut if isinstance(image, CutImage) else None,
        )
        for image in said.images
    ]
    texts = said.text.split(_MARK)
    if len(texts) != len(pictures) + 1:
        # The pictures are not kept, or the text contains the mark, so their places are unknown.
        texts = [said.text] + [""] * len(pictures)
    parts: list[RecordedPart] = []
    for place, text in enumerate(texts):
        parts += pictures[place - 1 : place] if place else []
        parts += [RecordedPart(kind="text", value=text)] if text else []
    return tuple(parts)


def _written_image(part: data_messages.ImagePart, *, folder: Path, location: str) -> str:
    buffer = BytesIO()
    load_image(part, location=location).save(buffer, format="PNG")
    name = f"{IMAGES_FOLDER}/{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.png"
    target = folder / name
    if not target.exists():
        write_bytes_atomically(target, data=buffer.getvalue())
    return name


def read_messages(value: object, *, place: str) -> tuple[RecordedMessage, ...]:
    """Return the messages of a record; raises UserError, with its place, for malformed ones."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UserError(f"{place}: messages must be a list of objects with role and content")
    return tuple(_message(message, place=f"{place}, message {number}") for number, message in enumerate(value, 1))


def read_turns(value: object, *, place: str) -> tuple[RecordedTurn, ...]:
    """Return the turns of an episode; raises like `read_messages`. Earlier versions wrote pairs of role and text."""
    if not isinstance(value, list):
        raise UserError(f"{place}: said must be a list of turns, found {value!r:.80}")
    return tuple(_turn(turn, place=f"{place}, turn {number}") for number, turn in enumerate(value, 1))


def _turn(value: object, *, place: str) -> RecordedTurn:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value):
        role, text = value
        return RecordedTurn(role=role, parts=(RecordedPart(kind="text", value=text),))
    if not isinstance(value, dict):
        raise UserError(f"{place}: a turn must be an object with role and content, found {value!r:.80}")
    message = _message(value, place=place)
    calls, rewards = value.get("calls", []), value.get("rewards", {})
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{place}: calls must be a list of objects, found {calls!r:.80}")
    if not isinstance(rewards, dict):
        raise UserError(f"{place}: rewards must be an object of numbers by name, found {rewards!r:.80}")
    return RecordedTurn(
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


def _message(message: dict[str, object], *, place: str) -> RecordedMessage:
    role = text_field(message, "role", place=place)
    content = message.get("content")
    if isinstance(content, str):
        return RecordedMessage(role=role, parts=(RecordedPart(kind="text", value=content),))
    if not isinstance(content, list):
        raise UserError(f"{place}: content must be a string or a list of parts, found {type(content).__name__}")
    return RecordedMessage(role=role, parts=tuple(_part(part, place=place) for part in content))


def _part(part: object, *, place: str) -> RecordedPart:
    if not isinstance(part, dict):
        raise UserError(f"{place}: a content part must be an object with a type, found {type(part).__name__}")
    kind = text_field(part, "type", place=place)
    if kind == "text":
        return RecordedPart(kind="text", value=text_field(part, "text", place=place))
    if kind == "image":
        cut = None if part.get("cut") is None else _cut(part["cut"], place=place)
        return RecordedPart(kind="image", value=text_field(part, "image", place=place), cut=cut)
    return RecordedPart(kind="text", value=f"[{kind}]")


def _cut(record: object, *, place: str) -> Cut:
    if not isinstance(record, dict):
        raise UserError(f"{place}: cut must be an object with picture, name, box and size, found {record!r:.80}")
    left, upper, right, lower = _whole(record, "box", count=4, place=place)
    width, height = _whole(record, "size", count=2, place=place)
    if not (0 <= left < right <= width and 0 <= upper < lower <= height):
        raise UserError(f"{place}: the box {record['box']} is not inside a picture of {width} x {height} pixels")
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
    raise UserError(f"{place}: {key} must be a list of {count} whole numbers, at least 0, found {value!r:.80}")


def _point(value: object, *, place: str) -> tuple[float, float]:
    if isinstance(value, list) and len(value) == 2:
        if all(type(item) in (int, float) and abs(item) <= LARGEST_NUMBER for item in value):
            return float(value[0]), float(value[1])
    raise UserError(f"{place}: keypoint must be a list of two numbers, found {value!r:.80}")


ROLLOUTS_FILE = "rollouts.jsonl"
END_WORDS: dict[str, str] = {
    "over": "finished",
    "turns": "out of turns",
    "images": "out of pictures",
    "tokens": "out of tokens",
    "failed": "the environment failed",
}
"""How an episode ended, by the name in its record."""
assert set(END_WORDS) == set(get_args(EpisodeEnd))
DropReason = Literal["range", "std", "function"]
DROP_WORDS: dict[str, str] = {
    "range": "mean out of range",
    "std": "rewards hardly differ",
    "function": "by the user's function",
}
"""Why a group was dropped, by the name in its record."""
assert set(DROP_WORDS) == set(get_args(DropReason))


@dataclass(frozen=True, kw_only=True)
class SampledResponse:
    """One sampled response with its reward, as a line holds it in addition to the prompt's `messages`."""

    step: int
    group: int
    """Responses to the same prompt within a step share this number."""
    response: str
    label: str
    reward: float | None
    scores: Mapping[str, float | None]
    """The named parts of the reward, and for an episode its counts."""
    response_tokens: int
    truncated: bool
    weight_version: int | None = None
    """The number of weight updates of the engine; None in records of earlier versions."""
    weights: tuple[tuple[int, int], ...] = ()
    """The weight versions of its tokens, and how many tokens each sampled; empty if not recorded."""
    held_out: bool = False
    said: tuple[RecordedTurn, ...] = ()
    end: str | None = None
    masked: bool = False
    """Whether an episode is left out of the loss and of the comparison within its group."""
    greedy: bool = False
    """Whether it is the greedy response that its group is compared with, which was not trained on."""
    counts: Mapping[str, float | None] = field(default_factory=dict)
    """The environment's counts in an episode, which `scores` includes."""
    dropped: str | None = None

    @classmethod
    def of(
        cls,
        sample: Sample,
        *,
        step: int,
        group: int,
        held_out: bool = False,
        greedy: bool = False,
        said: tuple[RecordedTurn, ...] = (),
        dropped: str | None = None,
    ) -> SampledResponse:
        """Return the record of a sample that has its reward."""
        played = sample.played
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
            weights=tuple((span.version, span.tokens) for span in sample.weights),
            held_out=held_out,
            said=said,
            end=None if played is None else played.end,
            masked=sample.masked,
            greedy=greedy,
            counts={} if played is None else played.counts,
            dropped=dropped,
        )


def shown_messages(sample: Sample) -> tuple[data_messages.Message, ...]:
    """Return a sample's prompt as shown to the policy, if that is kept; else that of its row."""
    return sample.row.messages if sample.played is None else sample.played.shown or sample.row.messages


@dataclass(frozen=True, kw_only=True)
class RecordedRollout(SampledResponse):
    messages: tuple[RecordedMessage, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutLog:
    """The index of a stage's rollout file, which is checked once; rollouts are then read a few at a time.

    So a file larger than memory can be sampled.
    """

    path: Path
    steps: tuple[int, ...] = ()
    """The step of each rollout, in the order of the file."""
    groups: tuple[tuple[int, bool], ...] = ()
    """Its group within the step, and whether it answers a held-out row."""
    offsets: tuple[int, ...] = ()
    torn_lines: int = 0

    def __len__(self) -> int:
        return len(self.steps)

    def read(self, indices: Iterable[int]) -> list[RecordedRollout]:
        """Return the rollouts at these positions of the file, in the requested order."""
        indices = list(indices)
        if not indices:
            return []
        with self.path.open("rb") as stream:
            return [self._read_at(stream, index) for index in indices]

    def _read_at(self, stream: BinaryIO, index: int) -> RecordedRollout:
        stream.seek(self.offsets[index])
        return _rollout(json.loads(stream.readline()), place=f"{self.path}, byte {self.offsets[index]}")


def append_rollout(
    folder: Path, response: SampledResponse, *, messages: Sequence[data_messages.Message], location: str
) -> list[dict[str, Any]]:
    """Append a response with its prompt to the file in a run folder, and return the prompt as written.

    Each image of the prompt is stored once under images/; `location` names its row for messages.
    """
    written = [write_message(message, folder=folder, location=location) for message in messages]
    said = [turn_record(turn) for turn in response.said]
    append_json_lines(folder / ROLLOUTS_FILE, [{**asdict(response), "said": said, "messages": written}])
    return written


def read_rollouts(path: Path) -> RolloutLog:
    """Return the index of a rollout file, empty if there is none; raises UserError, with the line, for a malformed one."""
    if not path.exists():
        return RolloutLog(path=path)
    steps: list[int] = []
    groups: list[tuple[int, bool]] = []
    offsets: list[int] = []
    torn = 0
    for line in read_json_lines(path):
        if line.record is None:
            torn += 1
            continue
        rollout = _rollout(line.record, place=line.place)
        steps.append(rollout.step)
        groups.append((rollout.group, rollout.held_out))
        offsets.append(line.offset)
    return RolloutLog(path=path, steps=tuple(steps), groups=tuple(groups), offsets=tuple(offsets), torn_lines=torn)


def _rollout(record: dict[str, object], *, place: str) -> RecordedRollout:
    return RecordedRollout(
        step=count_field(record, "step", place=place),
        group=count_field(record, "group", place=place),
        messages=read_messages(record.get("messages"), place=place),
        response=text_field(record, "response", place=place),
        label=text_field(record, "label", place=place),
        reward=number_field(record, "reward", place=place),
        scores=_numbers(record, "scores", place=place),
        response_tokens=count_field(record, "response_tokens", place=place),
        truncated=record.get("truncated") is True,
        weight_version=(
            None if record.get("weight_version") is None else count_field(record, "weight_version", place=place)
        ),
        weights=_spans(record.get("weights", []), place=place),
        held_out=record.get("held_out") is True,
        said=read_turns(record.get("said", []), place=place),
        end=None if record.get("end") is None else text_field(record, "end", place=place),
        masked=record.get("masked") is True,
        greedy=record.get("greedy") is True,
        counts=_numbers(record, "counts", place=place),
        dropped=None if record.get("dropped") is None else text_field(record, "dropped", place=place),
    )


def _spans(found: object, *, place: str) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for pair in found if isinstance(found, list) else [found]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)):
            raise UserError(f"{place}: weights must be pairs of a version and a number of tokens, found {found!r}")
        spans.append((pair[0], pair[1]))
    return tuple(spans)


def _numbers(record: dict[str, object], key: str, *, place: str) -> dict[str, float | None]:
    values = record.get(key, {})
    if not isinstance(values, dict):
        raise UserError(f"{place}: {key} must be an object of numbers by name, found {values!r}")
    return {name: number_field(values, name, place=f"{place}, {key}") for name in values}
