"""Which groups a step trains on: filters, and groups that are generated in excess."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, get_args

import torch

from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.records.rollouts import DropReason
from lmm_r1.rl.advantages import group_deviations
from lmm_r1.rl.experience_filter import ExperienceFilter


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

    def why(self, reason: DropReason, count: int) -> tuple[str, str]:
        """Return a phrase that `count` groups were dropped for a reason, and what to do about it."""
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


def rewards_summary(dropped: Sequence[DroppedGroup]) -> str:
    """Return a summary of the rewards of dropped groups: `in 3 groups all are 0, in 1 all are 1, in 2 they differ
    (0.5 to 1.5)`."""
    equal = Counter(group.rewards[0] for group in dropped if len(set(group.rewards)) == 1)
    phrases = [f"in {count} groups all are {value:g}" for value, count in equal.most_common(3)]
    others = sum(equal.values()) - sum(count for _, count in equal.most_common(3))
    if others:
        phrases.append(f"in {others} all are equal to some other number")
    differing = [value for group in dropped if len(set(group.rewards)) > 1 for value in group.rewards]
    if differing:
        number = sum(len(set(group.rewards)) > 1 for group in dropped)
        phrases.append(f"in {number} they differ ({min(differing):g} to {max(differing):g})")
    return ", ".join(phrases)


_UNDER_WAY = "under_way"


@dataclass(kw_only=True, eq=False)
class StartedGroup:
    """A group that an engine has started and no rollout has taken."""

    row: Row
    place: int
    """The place of its row among the run's rows."""
    engine: int
    """The engine that generates it."""
    ref: Any
    """The reference to the engine's answer."""
    held_over: int = 0
    """How many rollouts have ended without it."""
    samples: list[Sample] | None = None
    """None until the group has finished."""


class GroupsUnderWay:
    """The groups that were started and not taken, in the order of their start.

    A rollout starts more groups than it takes. Groups of short responses finish first and are taken first. Groups of long
    responses continue, and the next rollouts take them. None is lost: a rollout waits for a group that was held over
    `most_held` times.
    """

    def __init__(self, *, factor: float, most_held: int) -> None:
        """Args: factor: groups under way at the same time, as a multiple of a step's groups, 1 to 2."""
        assert 1 <= factor <= 2, "with more, the next step would have no room for all groups that it must take"
        self.factor = factor
        self.most_held = most_held
        self.groups: list[StartedGroup] = []
        # The places of rows that were under way when the last session ended; this one starts with them.
        self._again: deque[int] = deque()

    @property
    def used(self) -> bool:
        """Whether rollouts start more groups than they take."""
        return self.factor > 1

    @property
    def unfinished(self) -> list[StartedGroup]:
        """The groups that engines are generating."""
        return [group for group in self.groups if group.samples is None]

    def available(self, prompts: PromptStream, *, batch: int) -> int:
        """Return how many groups rollouts of `batch` groups can still take in total."""
        return len(self.groups) + len(self._again) + prompts.left(batch=batch)

    def next_rows(self, prompts: PromptStream, *, batch: int, taken: int) -> list[tuple[int, Row]]:
        """Return the (place, row) of the groups to start now, in a rollout of `batch` groups that has taken some."""
        wanted = self.target(batch) - taken - len(self.groups)
        found: list[tuple[int, Row]] = []
        while self._again and len(found) < wanted:
            place = self._again.popleft()
            found.append((place, prompts.rows[place]))
        while len(found) < wanted and (rows := prompts.take_of_batches(wanted - len(found), batch=batch)):
            found.extend(zip(prompts.taken, rows, strict=True))
        return found

    def target(self, batch: int) -> int:
        """Return how many groups of a rollout are taken or under way at the same time: 1.25 times 6 gives 8."""
        # Round first: 1.1 times 10 must give 11, not 12.
        return math.ceil(round(self.factor * batch, 6))

    def take(self, *, room: int) -> StartedGroup | None:
        """Return the oldest finished group for a rollout with room for `room` more; None if it must wait.

        Room is kept for groups that must be in this rollout.
        """
        due = [group for group in self.groups if group.held_over >= self.most_held]
        for group in due if room <= len(due) else self.groups:
            if group.samples is not None and room > 0:
                self.groups.remove(group)
                return group
        return None

    def end_rollout(self) -> None:
        """Hold over the groups that were not taken."""
        for group in self.groups:
            group.held_over += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`; empty if no group is under way."""
        places = [group.place for group in self.groups] + list(self._again)
        return {_UNDER_WAY: places} if places else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the groups again first that were under way when the state was saved."""
        self.groups, self._again = [], deque(state.get(_UNDER_WAY, ()))


def kept_tokens(samples: Iterable[Sample], *, updates: int) -> int:
    """Return how many of the samples' tokens were generated in earlier rollouts.

    Args:
        updates: how many updates the policy had before the step.
    """
    return sum(span.tokens for sample in samples for span in sample.weights if span.version < updates)
