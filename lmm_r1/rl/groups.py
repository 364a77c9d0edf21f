"""Which groups a step is made of: filters, and groups that are generated beyond those needed."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, get_args

import torch

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import FILTER_NAME
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import load_user_file, raised_at
from lmm_r1.records.rollouts import DropReason
from lmm_r1.rl.advantages import group_deviations

FLAG = "--algo.experience_filter"
MODULE_NAME = "experience_filter"
"""What the module of the user's file is called."""
_SPEC = re.compile(r"(?P<path>.+\.py)(:(?P<name>[A-Za-z_]\w*))?")


class ExperienceFilter:
    """The function of `FILE.py:NAME`, called with the samples of one group at a time.

    Each sample is a dict of plain values: prompt (messages as JSON), response, label, datasource, location, reward,
    score, parts, response_length, truncated, masked, step.
    """

    def __init__(self, spec: str) -> None:
        """Import the file; raises UserError where it has no such function."""
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise UserError(f"{FLAG} {spec} names no file; give it as FILE.py or FILE.py:FUNCTION")
        self.spec = spec
        self._path, self._name = match["path"], match["name"] or FILTER_NAME
        module = load_user_file(self._path, name=MODULE_NAME, what=FLAG)
        self._function: Any = getattr(module, self._name, None)
        if not callable(self._function):
            raise UserError(
                f"{FLAG} {spec}: the file defines no {self._name}(samples); add one, or name another function behind a "
                f"colon, as in {self._path}:NAME"
            )

    def __call__(self, group: Sequence[Sample], *, step: int | None) -> list[bool]:
        """Return of each sample whether it is kept; raises UserError, with the file's line, where the function fails.

        Args:
            step: that learns from the group.
        """
        location = group[0].row.location
        try:
            reply = self._function([_shown(sample, step=step) for sample in group])
        except Exception as error:  # the user's own code, which may raise anything
            place = raised_at(error, modules=(MODULE_NAME,))
            where = f"{FLAG} {self.spec}" if place is None else f"{FLAG} {place[0]}, line {place[1]}"
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UserError(f"{where}: {self._name} raised {said}, for the group of {location}") from error
        if isinstance(reply, bool):
            return [reply] * len(group)
        kept = reply.tolist() if hasattr(reply, "tolist") else reply
        if not isinstance(kept, list | tuple) or len(kept) != len(group) or any(type(its) is not bool for its in kept):
            raise UserError(
                f"{FLAG} {self._path}: {self._name} returned {str(reply)[:200]} for the group of {location}; return True or "
                f"False for the whole group, or a list of {len(group)} of them, one for each sample"
            )
        return list(kept)


def _shown(sample: Sample, *, step: int | None) -> dict[str, object]:
    """Return a sample as the user's function is given it; what it does to it changes nothing."""
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


_UNDER_WAY = "under_way"


@dataclass(kw_only=True, eq=False)
class StartedGroup:
    """A group that an engine was asked for, and no rollout has taken."""

    row: Row
    place: int
    """Of its row among the run's."""
    engine: int
    """Which one makes it."""
    ref: Any
    """What the engine gives."""
    held_over: int = 0
    """How many rollouts have ended without it."""
    samples: list[Sample] | None = None
    """None until it has finished."""


class GroupsUnderWay:
    """The groups that were begun and not taken, in the order in which they were begun.

    A rollout begins more than it takes. Those of short responses finish first, so that it is rather these that it takes;
    those of long ones go on where they are, and the next rollouts take them: none is lost, and one that was held over
    `most_held` times is waited for.
    """

    def __init__(self, *, factor: float, most_held: int) -> None:
        """Args: factor: how many times as many groups as a step has are under way together, 1 to 2."""
        assert 1 <= factor <= 2, "of more, the next step had no room for all that must be in it"
        self.factor = factor
        self.most_held = most_held
        self.groups: list[StartedGroup] = []
        # Of rows that were under way when a session ended, which this one begins with.
        self._again: deque[int] = deque()

    @property
    def used(self) -> bool:
        """Whether rollouts begin more than they take."""
        return self.factor > 1

    @property
    def unfinished(self) -> list[StartedGroup]:
        """The groups that an engine is at."""
        return [group for group in self.groups if group.samples is None]

    def available(self, prompts: PromptStream, *, batch: int) -> int:
        """Return how many groups rollouts of `batch` can still take in all."""
        return len(self.groups) + len(self._again) + prompts.left(batch=batch)

    def next_rows(self, prompts: PromptStream, *, batch: int, taken: int) -> list[tuple[int, Row]]:
        """Return the (place, row) of the groups to begin now, in a rollout that has taken some of its `batch`."""
        wanted = self.target(batch) - taken - len(self.groups)
        found: list[tuple[int, Row]] = []
        while self._again and len(found) < wanted:
            place = self._again.popleft()
            found.append((place, prompts.rows[place]))
        while len(found) < wanted and (rows := prompts.take_of_batches(wanted - len(found), batch=batch)):
            found.extend(zip(prompts.taken, rows, strict=True))
        return found

    def target(self, batch: int) -> int:
        """Return how many groups of a rollout are taken and under way together: 1.25 times 6 are 8."""
        # 1.1 times 10 are no 12.
        return math.ceil(round(self.factor * batch, 6))

    def take(self, *, room: int) -> StartedGroup | None:
        """Return the next finished group of a rollout that has room for so many, the oldest first; None where it must wait.

        Room is kept for those that must be in this rollout.
        """
        due = [group for group in self.groups if group.held_over >= self.most_held]
        for group in due if room <= len(due) else self.groups:
            if group.samples is not None and room > 0:
                self.groups.remove(group)
                return group
        return None

    def end_rollout(self) -> None:
        """Hold over what was not taken."""
        for group in self.groups:
            group.held_over += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from; nothing where none is under way."""
        places = [group.place for group in self.groups] + list(self._again)
        return {_UNDER_WAY: places} if places else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin anew, first of all, what was under way when a state was saved."""
        self.groups, self._again = [], deque(state.get(_UNDER_WAY, ()))


def kept_tokens(samples: Iterable[Sample], *, updates: int) -> int:
    """Return how many of the samples' tokens were generated in earlier rollouts.

    Args:
        updates: how many the policy has had before the step.
    """
    return sum(span.tokens for sample in samples for span in sample.weights if span.version < updates)
