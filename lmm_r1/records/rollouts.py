"""rollouts.jsonl of a run folder: sampled responses and episodes with their prompts; images are files next to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from lmm_r1.data import messages as data_messages
from lmm_r1.data.images import load_image
from lmm_r1.data.sample import CallOutcome, Cut, CutImage, EpisodeEnd, Said, Sample
from lmm_r1.files.atomic import write_bytes_atomically
from lmm_r1.files.json_files import Count, Number, append_json_lines, checked, read_json_lines

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
    rewards: Mapping[str, Number] = field(default_factory=dict)


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


def _plain(messages: object) -> object:
    """Return messages of a record in the form of `RecordedMessage`, as far as they can be read."""
    if not isinstance(messages, list):
        return messages
    return [
        message | {"parts": _parts(message.get("content"))} if isinstance(message, dict) else message
        for message in messages
    ]


def _parts(content: object) -> object:
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    return [
        (
            {"kind": part["type"], "value": part.get(part["type"]), "cut": part.get("cut")}
            if part.get("type") in ("text", "image")
            else {"kind": "text", "value": f"[{part.get('type')}]"}
        )
        for part in content
    ]


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

    step: Count
    group: Count
    """Responses to the same prompt within a step share this number."""
    response: str
    label: str
    reward: Number
    scores: Mapping[str, Number]
    """The named parts of the reward, and for an episode its counts."""
    response_tokens: Count
    truncated: bool
    weight_version: Count | None = None
    """The number of weight updates of the engine; None in records of earlier versions."""
    weights: tuple[tuple[Count, Count], ...] = ()
    """The weight versions of its tokens, and how many tokens each sampled; empty if not recorded."""
    held_out: bool = False
    said: tuple[RecordedTurn, ...] = ()
    end: str | None = None
    masked: bool = False
    """Whether an episode is left out of the loss and of the comparison within its group."""
    greedy: bool = False
    """Whether it is the greedy response that its group is compared with, which was not trained on."""
    counts: Mapping[str, Number] = field(default_factory=dict)
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
    plain = record | {"messages": _plain(record.get("messages")), "said": _plain(record.get("said", []))}
    return checked(RecordedRollout, plain, place=place)
