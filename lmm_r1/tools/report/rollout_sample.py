"""Which rollouts a page embeds, and the form in which its script gets them and their prompts."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lmm_r1.records.rollouts import DROP_WORDS, END_WORDS, RecordedPart, RecordedRollout, SampledResponse
from lmm_r1.records.run_folder import Stage
from lmm_r1.tools.evaluation.page_parts import MAX_BYTES, MIN_BYTES, ImageError, data_uri, script_json

# The total size of the images of a page.
TOTAL_BYTES = 64 * 1024 * 1024


class InlineImages:
    """Collects images; the same content is embedded once, however many rollouts and files show it.

    Args:
        count: the expected number of different images; with more of them, large ones are scaled down further.
    """

    def __init__(self, *, count: int = 1) -> None:
        self.uris: dict[str, int] = {}
        """The images in the order of their indices."""
        self._found: dict[str, int | ImageError] = {}
        self._max_bytes = max(MIN_BYTES, min(MAX_BYTES, TOTAL_BYTES // max(1, count)))

    def add(self, reference: str, *, folder: Path) -> int:
        """Return the index in `uris` of an image that a rollout of the stage in `folder` refers to."""
        key = image_key(reference, folder=folder)
        if key not in self._found:
            try:
                uri = data_uri(_image_bytes(reference, folder=folder), max_bytes=self._max_bytes)
                self._found[key] = self.uris.setdefault(uri, len(self.uris))
            except ImageError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, ImageError):
            raise found
        return found


def image_key(reference: str, *, folder: Path) -> str:
    """Return a key that identifies an image of the stage in `folder` before it is read."""
    return reference if reference.startswith("data:") else str(folder / reference)


def _image_bytes(reference: str, *, folder: Path) -> bytes:
    if reference.startswith("data:"):
        try:
            return base64.b64decode(reference.partition(",")[2], validate=True)
        except ValueError as error:
            raise ImageError("not a base64 data URI") from error
    if "://" in reference:
        raise ImageError("not in the run folder")
    # The page may be passed on, so a rollout must not be able to embed any other file of this machine.
    path = (folder / reference).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ImageError("not in the run folder")
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ImageError("file not found") from error


NOTED = ("turns", "shown_images", "over_turn", "environment_failed")
"""The counts in the scores of every episode, in addition to those of its environment."""
WHY_ENDED = {
    "over": "the policy gave its answer, or the environment ended the episode",
    "turns": "it would have continued beyond the turns of --agent.max_turns",
    "images": "it would have been shown more pictures than --agent.max_images",
    "tokens": "it would have continued beyond the tokens of --data.max_len",
    "failed": "it raised an error, showed something unusable, or took longer than --agent.answer_s",
}
assert set(WHY_ENDED) == set(END_WORDS)


def episode_record(rollout: RecordedRollout, *, images: InlineImages, folder: Path) -> dict[str, Any]:
    """Return the page's data about a rollout's episode; empty values for a single response."""
    noted = [name for name in NOTED if name in rollout.scores] if rollout.end is not None else []
    return {
        "said": [
            {
                "role": turn.role,
                "parts": [shown_part(part, images=images, folder=folder) for part in turn.parts],
                "calls": [asdict(call) for call in turn.calls],
                "rewards": turn.rewards,
            }
            for turn in rollout.said
        ],
        "ended": END_WORDS.get(rollout.end, rollout.end) if rollout.end is not None else None,
        "why_ended": WHY_ENDED.get(rollout.end, "") if rollout.end is not None else "",
        # The entries of `scores` that are not rewards.
        "counted": [*rollout.counts, *noted],
    }


def shown_part(part: RecordedPart, *, images: InlineImages, folder: Path) -> dict[str, object]:
    """Return a part of a message for the page's script: a text, an image, or why that is missing."""
    if part.kind == "text":
        return {"text": part.value}
    cut = {} if part.cut is None else {"cut": asdict(part.cut)}
    try:
        return {"image": images.add(part.value, folder=folder), **cut}
    except ImageError as error:
        shown = "data URI" if part.value.startswith("data:") else part.value
        return {"missing": f"{shown}: {error}", **cut}


DEFAULT_MAX_ROLLOUTS = 5000


@dataclass(frozen=True, kw_only=True)
class Series:
    """One stage of one run, with its name and colour on the page."""

    run: str
    stage: Stage
    color: int
    """That of the run if several are compared, else that of the stage."""


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    total: int
    rollouts: list[dict[str, object]]
    prompts: list[list[dict[str, Any]]]
    """Distinct conversations; a rollout holds an index into this list."""
    images: list[str]
    """Data URIs; an image part of a prompt or a turn is an index into this list."""
    missing_images: int


def sample_rollouts(series: Sequence[Series], *, limit: int) -> RolloutSample:
    """Return at most `limit` rollouts of these stages, as whole groups spread evenly over their steps.

    Groups are split only if not even those of one step fit.
    """
    stages = [member.stage for member in series]
    groups = [[(number, at) for at in group] for number, stage in enumerate(stages) for group in _groups(stage)]
    chosen: list[list[int]] = [[] for _ in stages]
    for number, index in itertools.chain(*whole_groups(groups, limit=limit)):
        chosen[number].append(index)
    drawn = [
        (number, rollout)
        for number, (stage, indices) in enumerate(zip(stages, chosen, strict=True))
        for rollout in stage.rollouts.read(sorted(indices))
    ]
    keys = {
        image_key(part.value, folder=stages[number].folder)
        for number, rollout in drawn
        for message in (*rollout.messages, *rollout.said)
        for part in message.parts
        if part.kind == "image"
    }
    images = InlineImages(count=len(keys))
    prompts: dict[str, int] = {}
    conversations: list[list[dict[str, Any]]] = []
    records, missing = [], 0
    for number, rollout in drawn:
        folder = stages[number].folder
        prompt: list[dict[str, Any]] = [
            {"role": message.role, "parts": [shown_part(part, images=images, folder=folder) for part in message.parts]}
            for message in rollout.messages
        ]
        place = prompts.setdefault(json.dumps(prompt), len(conversations))
        if place == len(conversations):
            conversations.append(prompt)
        episode = episode_record(rollout, images=images, folder=folder)
        missing += sum("missing" in part for turn in (*prompt, *episode["said"]) for part in turn["parts"])
        records.append(_record(rollout, series=number, prompt=place) | episode)
    return RolloutSample(
        total=sum(len(stage.rollouts) for stage in stages),
        rollouts=records,
        prompts=conversations,
        images=list(images.uris),
        missing_images=missing,
    )


def rollout_data(series: Sequence[Series], *, sample: RolloutSample) -> dict[str, str]:
    """Return the data for the page's two script blocks: `rollouts` as JSON, `images` as lines."""
    named = [{"run": member.run, "stage": member.stage.name, "color": member.color} for member in series]
    data = {"series": named, "prompts": sample.prompts, "rollouts": sample.rollouts}
    # The data URIs are made here, with a known type and base64, so they cannot contain markup.
    return {"rollouts": script_json(data), "images": "\n".join(sample.images)}


Group = Sequence[tuple[int, int]]
"""The stage and the index of each rollout of a group."""


def whole_groups(groups: Sequence[Group], *, limit: int) -> list[Group]:
    """Return groups of at most `limit` rollouts together, spread evenly; they are split only if no whole one fits."""
    most = min(len(groups), limit // min(map(len, groups), default=1))
    for count in range(most, 0, -1):
        places = [round(at * (len(groups) - 1) / max(1, count - 1)) for at in range(count)]
        if sum(len(groups[place]) for place in places) <= limit:
            return [groups[place] for place in places]
    return whole_groups([[one] for group in groups for one in group], limit=limit) if limit and groups else []


def _groups(stage: Stage) -> list[list[int]]:
    """Return the positions of the rollouts of each group, in the order of steps."""
    found: dict[tuple[int, tuple[int, bool]], list[int]] = {}
    for index, place in enumerate(zip(stage.rollouts.steps, stage.rollouts.groups, strict=True)):
        found.setdefault(place, []).append(index)
    return [found[place] for place in sorted(found, key=lambda place: place[0])]


def _record(rollout: RecordedRollout, *, series: int, prompt: int) -> dict[str, object]:
    """Return a rollout for the page's script: the fields of its record, of which one is renamed."""
    kept = {field.name: getattr(rollout, field.name) for field in fields(SampledResponse) if field.name != "said"}
    # Links to shared pages use this name.
    kept["tokens"] = kept.pop("response_tokens")
    if rollout.dropped is not None:
        kept["dropped"] = DROP_WORDS.get(rollout.dropped, rollout.dropped)
    return {**kept, "series": series, "prompt": prompt, "verdict": verdict(rollout)}


def verdict(rollout: RecordedRollout) -> str | None:
    """Return `right`, `wrong` or `partly` for values in between; None if accuracy was not scored."""
    accuracy = rollout.scores.get("accuracy")
    if accuracy is None:
        return None
    if accuracy >= 1:
        return "right"
    return "wrong" if accuracy <= 0 else "partly"
