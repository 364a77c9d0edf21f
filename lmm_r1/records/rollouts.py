"""rollouts.jsonl of a run folder: sampled responses and episodes with their prompts, whose images lie beside it."""

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


ROLLOUTS_FILE = "rollouts.jsonl"
END_WORDS: dict[str, str] = {
    "over": "finished",
    "turns": "out of turns",
    "images": "out of pictures",
    "tokens": "out of tokens",
    "failed": "the environment failed",
}
"""How an episode has ended, by the name in its record."""
assert set(END_WORDS) == set(get_args(EpisodeEnd))
DropReason = Literal["range", "std", "function"]
"""The mean score is out of range, the rewards hardly differ, or the user's function keeps no sample."""
DROP_WORDS: dict[str, str] = {
    "range": "mean out of range",
    "std": "rewards hardly differ",
    "function": "by the user's function",
}
"""Why a group was dropped, by the name in its record."""
assert set(DROP_WORDS) == set(get_args(DropReason))


@dataclass(frozen=True, kw_only=True)
class SampledResponse:
    """One sampled response with its reward, as a line holds it beside the prompt's `messages`."""

    step: int
    group: int
    """Responses to the same prompt within a step share this number."""
    response: str
    """Of an episode, the policy's last turn."""
    label: str
    reward: float | None
    scores: Mapping[str, float | None]
    """The named parts of the reward, and of an episode what is counted in it."""
    response_tokens: int
    truncated: bool
    weight_version: int | None = None
    """How many weight updates the engine had had; None in records of earlier versions."""
    weights: tuple[tuple[int, int], ...] = ()
    """Which weight versions its tokens came of, and how many of each; empty where nobody has noted it."""
    held_out: bool = False
    """Whether it answers a row of the evaluation, and nothing was learnt from it."""
    said: tuple[Turn, ...] = ()
    """Of an episode, its turns behind the prompt; empty for a single response."""
    end: str | None = None
    """How an episode has ended: `EpisodeEnd`."""
    masked: bool = False
    """Whether nothing is learnt from an episode, and its group is compared without it."""
    greedy: bool = False
    """Whether it is the greedy response that its group is compared with, and nothing was learnt from it."""
    counts: Mapping[str, float | None] = field(default_factory=dict)
    """What the environment has counted in an episode; `scores` has it, too."""
    dropped: str | None = None
    """Why its group was dropped, and nothing learnt from it: `DropReason`."""

    @classmethod
    def of(
        cls,
        sample: Sample,
        *,
        step: int,
        group: int,
        held_out: bool = False,
        greedy: bool = False,
        said: tuple[Turn, ...] = (),
        dropped: str | None = None,
    ) -> SampledResponse:
        """Return what is kept of a sample that has its reward.

        Args:
            said: the turns of an episode, as the run folder keeps them.
        """
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
    """Return a sample's prompt as the policy was shown it, as far as that is kept; else as its row has it."""
    return sample.row.messages if sample.played is None else sample.played.shown or sample.row.messages


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
    groups: tuple[tuple[int, bool], ...] = ()
    """Its group within the step, and whether that is one of held-out rows."""
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
    written = [write_message(message, folder=folder, location=location) for message in messages]
    said = [turn_record(turn) for turn in response.said]
    append_json_lines(folder / ROLLOUTS_FILE, [{**asdict(response), "said": said, "messages": written}])
    return written


def read_rollouts(path: Path) -> RolloutLog:
    """Return the index of a rollout file, empty if there is none; a malformed line is a UserError naming it."""
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


def _rollout(record: dict[str, object], *, place: str) -> Rollout:
    return Rollout(
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
