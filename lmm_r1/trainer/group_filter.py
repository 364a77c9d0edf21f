"""Which groups of a rollout are learnt from: bounds on their scores and rewards, and a function of the user's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import get_args

import torch

from lmm_r1.config import PPOConfig
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.records.rollouts import DropReason
from lmm_r1.trainer.advantages import group_deviations
from lmm_r1.trainer.experience_filter import ExperienceFilter


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """A group that nothing is learnt from."""

    reason: DropReason
    rewards: tuple[float, ...]
    samples: tuple[Sample, ...] = ()
    """For the records, without their media; empty where others fill them."""


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Decides on a group of samples with rewards; masked samples, which no group is compared with, have no say."""

    bounds: tuple[float, float] | None = None
    """Means strictly between these are kept (DAPO, arXiv:2503.14476); None keeps any."""
    part: str | None = None
    """The part of the reward whose mean it is; None is the score."""
    min_std: float | None = None
    """Least standard deviation of the rewards, n - 1 degrees of freedom, as advantages are divided by; None keeps any."""
    function: ExperienceFilter | None = None
    max_batches: int = 0
    """How many times as many prompts as it has groups a step may take to be full; 0 has no bound."""

    @classmethod
    def of(cls, config: PPOConfig) -> GroupFilter:
        """Return that of a run; raises UserError where `--algo.experience_filter` is no function of a file."""
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
        """Return the group as it is learnt from, with what the user's function leaves out masked, or why it is dropped.

        Raises UserError where a reward has no such part, or the function fails.

        Args:
            step: that learns from it, for the function.
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
        # What is no number stops the run where advantages are made, and is not dropped without a word.
        if not low < mean < high and not math.isnan(mean):
            return "range"
        return "std" if self.min_std is not None and deviation(counted) < self.min_std else None

    @property
    def masks(self) -> bool:
        """Whether it may leave single samples out."""
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

    def why(self, reason: DropReason, count: int) -> tuple[str, str]:
        """Return how it is told that `count` groups were dropped for a reason, and what can be done about it."""
        if reason == "function":
            assert self.function is not None, "it has dropped them"
            return (
                f"{count} groups had no sample that --algo.experience_filter {self.function.spec} keeps",
                "look at what it returns",
            )
        advice = (
            "take prompts of another difficulty, raise --rollout.n_samples_per_prompt or leave "
            "--algo.dynamic_filtering_enable out"
        )
        if reason == "std":
            return (
                f"{count} groups had rewards with a standard deviation below --algo.dynamic_filtering_min_std "
                f"{self.min_std:g}",
                advice,
            )
        assert self.bounds is not None, "it has dropped them"
        low, high = self.bounds
        what = "score" if self.part is None else self.part
        return (
            f"{count} groups had a mean {what} that was not strictly between {low:g} and {high:g}, as "
            "--algo.dynamic_filtering_range asks",
            advice,
        )


KEEPS_ALL = GroupFilter()


def deviation(samples: Sequence[Sample]) -> float:
    """Return the standard deviation of samples' rewards, 0 for equal ones and for one alone."""
    return float(group_deviations(torch.tensor([[sample.scored.reward for sample in samples]], dtype=torch.double)))


def dropped_group(group: Sequence[Sample], reason: DropReason, *, recorded: bool) -> DroppedGroup:
    """Return what is kept of a dropped group: nothing that holds memory of the object store.

    Args:
        recorded: whether its samples are for the records.
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


def rewards_told(dropped: Sequence[DroppedGroup]) -> str:
    """Return what the rewards of dropped groups look like: `in 3 groups all are 0, in 1 all are 1, in 2 they differ
    (0.5 to 1.5)`."""
    equal = Counter(group.rewards[0] for group in dropped if len(set(group.rewards)) == 1)
    told = [f"in {count} groups all are {value:g}" for value, count in equal.most_common(3)]
    others = sum(equal.values()) - sum(count for _, count in equal.most_common(3))
    if others:
        told.append(f"in {others} all are equal to some other number")
    differing = [value for group in dropped if len(set(group.rewards)) > 1 for value in group.rewards]
    if differing:
        number = sum(len(set(group.rewards)) > 1 for group in dropped)
        told.append(f"in {number} they differ ({min(differing):g} to {max(differing):g})")
    return ", ".join(told)
