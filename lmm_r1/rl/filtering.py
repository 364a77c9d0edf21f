"""Which groups a step trains on: by their rewards, and by a user's function."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import get_args

import torch

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import FILTER_NAME
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import load_user_function
from lmm_r1.records.rollouts import DropReason
from lmm_r1.rl.advantages import group_deviations

FLAG = "--algo.experience_filter"


class ExperienceFilter:
    """The user's function `FILE.py:NAME?option=value`, called with the samples of one group at a time.

    Each sample is a dict of plain values: prompt (messages as JSON), response, label, datasource, location, reward,
    score, parts, response_length, truncated, masked, step.
    """

    def __init__(self, spec: str) -> None:
        """Import the file; raises UserError if it has no such function."""
        self.spec = spec
        self._function = load_user_function(spec, default=FILTER_NAME, flag=FLAG)

    def __call__(self, group: Sequence[Sample], *, step: int | None) -> list[bool]:
        """Return for each sample whether it is kept; raises UserError, with the file's line, if the function fails.

        Args:
            step: the step that trains on the group.
        """
        samples = [_shown(sample, step=step) for sample in group]
        place, count = f"for the group of {samples[0]['location']}", len(samples)
        try:
            reply = self._function(samples)
        except UserError as error:
            raise UserError(f"{error}, {place}") from error
        if isinstance(reply, bool):
            return [reply] * count
        kept = reply.tolist() if hasattr(reply, "tolist") else reply
        if not isinstance(kept, list | tuple) or len(kept) != count or any(type(its) is not bool for its in kept):
            raise UserError(
                f"{FLAG} {self.spec}: it returned {str(reply)[:200]} {place}; return True or False for the whole group, "
                f"or a list of {count} of them, one for each sample"
            )
        return list(kept)


def _shown(sample: Sample, *, step: int | None) -> dict[str, object]:
    """Return a copy of a sample as plain values for the user's function."""
    score = sample.scored
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "datasource": sample.row.datasource,
        "location": sample.row.location,
        "reward": score.reward,
        "score": score.score,
        "parts": dict(score.parts),
        "response_length": sample.generated_tokens,
        "truncated": sample.truncated,
        "masked": sample.masked,
        "step": step,
    }


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """A group that is not trained on."""

    reason: DropReason
    rewards: tuple[float, ...]
    samples: tuple[Sample, ...] = ()
    """Samples to record, without their media; empty if other groups fill the records."""


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Decides whether a group of samples with rewards is kept; masked samples do not count."""

    bounds: tuple[float, float] | None = None
    """Means strictly between these are kept (DAPO, arXiv:2503.14476); None keeps any."""
    part: str | None = None
    """The part of the reward whose mean must be within the bounds; None is the score."""
    min_std: float | None = None
    """The least standard deviation of the rewards, with n - 1 degrees of freedom; None keeps any."""
    function: ExperienceFilter | None = None
    max_batches: int = 0
    """How many times its number of groups a step may take as prompts until it is full; 0 has no bound."""

    @classmethod
    def of(cls, config: PPOConfig) -> GroupFilter:
        """Return the filter of a run; raises UserError if `--algo.experience_filter` names no function of a file."""
        algo = config.algo
        function = None if algo.experience_filter is None else ExperienceFilter(algo.experience_filter)
        if not algo.dynamic_filtering_enable:
            return cls(function=function, max_batches=algo.dynamic_filtering_max_batches)
        return cls(
            bounds=algo.dynamic_filtering_range,
            part=algo.dynamic_filtering_part,
            min_std=algo.dynamic_filtering_min_std,
            function=function,
            max_batches=algo.dynamic_filtering_max_batches,
        )

    def judged(self, group: Sequence[Sample], *, step: int | None = None) -> list[Sample] | DropReason:
        """Return the group as it is trained on, with samples that the user's function drops masked, or why it is dropped.

        Raises UserError if a reward has no such part, or the function fails.

        Args:
            step: the step that trains on it, for the function.
        """
        judged = list(group)
        if self.function is not None:
            kept = self.function(group, step=step)
            if not any(kept):
                return "function"
            judged = [
                replace(sample, masked=sample.masked or not its) for sample, its in zip(group, kept, strict=True)
            ]
        counted = [sample for sample in judged if not sample.masked]
        reason = None if self.bounds is None else self._out_of_bounds(counted, self.bounds)
        return reason or judged

    def _out_of_bounds(self, counted: Sequence[Sample], bounds: tuple[float, float]) -> DropReason | None:
        if not counted:
            return "range"
        mean, (low, high) = fmean(map(self._level, counted)), bounds
        # Do not drop NaN silently: it stops the run when advantages are computed.
        if not low < mean < high and not math.isnan(mean):
            return "range"
        return "std" if self.min_std is not None and deviation(counted) < self.min_std else None

    @property
    def masks(self) -> bool:
        """Whether it may mask single samples."""
        return self.function is not None

    def _level(self, sample: Sample) -> float:
        if self.part is None:
            return sample.scored.score
        if self.part not in sample.scored.parts:
            found = ", ".join(sorted(sample.scored.parts)) or "none"
            raise UserError(
                f"--algo.dynamic_filtering_part {self.part}: the reward of a response to {sample.row.location} has no such "
                f"part (found: {found}); name one of them, or leave it out for the score"
            )
        return sample.scored.parts[self.part]


def deviation(samples: Sequence[Sample]) -> float:
    """Return the standard deviation of samples' rewards, 0 for equal rewards and for a single one."""
    return float(group_deviations(torch.tensor([[sample.scored.reward for sample in samples]], dtype=torch.double)))


def dropped_group(group: Sequence[Sample], reason: DropReason, *, recorded: bool) -> DroppedGroup:
    """Return a dropped group without anything that holds memory of the object store.

    Args:
        recorded: whether its samples are recorded.
    """
    bare = [
        replace(sample, segments=tuple(replace(segment, media=None) for segment in sample.segments))
        for sample in (group if recorded else ())
    ]
    return DroppedGroup(reason=reason, rewards=tuple(sample.scored.reward for sample in group), samples=tuple(bare))


def counts(dropped: Iterable[DroppedGroup]) -> dict[DropReason, int]:
    """Return how many groups were dropped for each reason that occurs, in the order of `DropReason`."""
    found = Counter(group.reason for group in dropped)
    return {reason: found[reason] for reason in get_args(DropReason) if found[reason]}


@dataclass(kw_only=True)
class Gathered:
    """The groups of a step so far."""

    count: int
    """Groups that fill it."""
    filter: GroupFilter
    recorded: int
    """Of how many samples of dropped groups there are records, at most; one group may exceed it."""
    groups: list[list[Sample]] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)
    overlong: int = 0
    refused: int = 0
    """Prompts that cannot be encoded."""
    in_vain: int = 0
    """Prompts since the last one whose group is trained on."""
    asked: int = 0
    """Prompts taken so far."""

    @property
    def missing(self) -> int:
        return self.count - len(self.groups)

    @property
    def room(self) -> int:
        """How many more prompts the step may take."""
        return self.filter.max_batches * self.count - self.asked if self.filter.max_batches else sys.maxsize

    def add(self, group: list[Sample], *, refused: bool, step: int | None) -> None:
        """Count a group, and add it to those that are trained on or to those that are dropped.

        Args:
            group: empty for a prompt that leaves no room for a response.
            refused: whether it is empty because its prompt cannot be encoded.
            step: the step that trains on it.
        """
        self.in_vain += 1
        if not group:
            self.refused += refused
            self.overlong += not refused
            return
        judged = self.filter.judged(group, step=step)
        if isinstance(judged, str):
            kept = sum(len(one.samples) for one in self.dropped)
            has_place = self.recorded > 0 and (kept == 0 or kept + len(group) <= self.recorded)
            self.dropped.append(dropped_group(group, judged, recorded=has_place))
        else:
            self.groups.append(judged)
            self.in_vain = 0

    def check(self, *, rows: int, max_len: int) -> None:
        """Raise UserError if the step cannot be filled.

        Args:
            rows: prompts of an episode.
        """
        in_vain, asked, count = self.in_vain, self.asked, self.count
        if in_vain < rows and (not self.missing or self.room):
            return
        why = why_dropped(self.filter, self.dropped, overlong=self.overlong, refused=self.refused, max_len=max_len)
        if in_vain >= rows:
            raise UserError(f"none of the last {in_vain} prompts, a whole episode, gave a group to train on: {why}")
        raise UserError(
            f"{asked} prompts, --algo.dynamic_filtering_max_batches {self.filter.max_batches} times "
            f"--rollout.batch_size, gave {len(self.groups)} of the {count} groups of a step: {why}"
        )


def why_dropped(
    group_filter: GroupFilter, dropped: Sequence[DroppedGroup], *, overlong: int, refused: int, max_len: int
) -> str:
    """Return why a step's groups were dropped, which rewards they had, and what to do about it."""
    number, (low, high) = counts(dropped), group_filter.bounds or (0.0, 0.0)
    bounds = f"strictly between {low:g} and {high:g}, as --algo.dynamic_filtering_range asks"
    least = f"below --algo.dynamic_filtering_min_std {group_filter.min_std}"
    others = (
        "take prompts of another difficulty, raise --rollout.n_samples_per_prompt or leave "
        "--algo.dynamic_filtering_enable out"
    )
    listed = [
        (number.get("range"), f"groups had a mean {group_filter.part or 'score'} that was not {bounds}", others),
        (number.get("std"), f"groups had rewards with a standard deviation {least}", others),
        (
            number.get("function"),
            "groups had no sample that --algo.experience_filter keeps",
            "look at what it returns",
        ),
        (overlong, "prompts left no room for a response", f"raise --data.max_len {max_len}"),
        (refused, "prompts cannot be encoded", "correct them: left_out_rows.jsonl lists them"),
    ]
    phrases = [(f"{count} {reason}", advice) for count, reason, advice in listed if count]
    rewards = [reward for group in dropped for reward in group.rewards]
    span = [f"the rewards of dropped groups are {min(rewards):g} to {max(rewards):g}"] if rewards else []
    return "; ".join(
        [", and ".join(reason for reason, _ in phrases), *span, *dict.fromkeys(to_do for _, to_do in phrases)]
    )
