"""rollouts.jsonl of a run folder: sampled responses and episodes with their prompts, whose images lie beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from lmm_r1.data import messages as data_messages
from lmm_r1.data.sample import EpisodeEnd, Sample
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import append_json_lines, count_field, number_field, read_json_lines, text_field
from lmm_r1.records.conversations import Message, Turn, read_messages, read_turns, turn_record, write_message

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
