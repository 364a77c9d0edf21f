"""What a step generates, and where the rollouts of a run come from: each made when it is due, or ahead of its step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from lmm_r1.config.rewards import WeightedPart
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.engine_arguments import Guesses
from lmm_r1.rl.groups import DroppedGroup
from lmm_r1.rl.outputs import ReferenceAhead
from lmm_r1.rl.samples import TrainingSample
from remote_rm.verifier import Score


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What one step generated."""

    samples: list[TrainingSample]
    groups: list[list[Sample]]
    """The same samples as the engines returned them, for the records."""
    overlong: int
    """Prompts left out because they leave no room for a response."""
    refused: int = 0
    """Prompts left out because they cannot be encoded."""
    dropped: tuple[DroppedGroup, ...] = ()
    """Groups that filters left out."""
    part_weights: tuple[WeightedPart, ...] = ()
    """The weights of the rewards' parts."""
    guesses: Guesses | None = None
    """Tokens of speculative decoding; None if the engines do not use it."""
    held_over: int = 0
    """Groups that have begun and continue in the next rollout."""
    ahead: ReferenceAhead | None = None
    """The reference's passes that have started; None if the reference waits for the whole rollout."""

    @property
    def filtered(self) -> int:
        """How many groups filters left out."""
        return len(self.dropped)

    @property
    def greedy(self) -> list[Sample]:
        """The greedy response to each group's prompt; empty if none is generated."""
        return [group[0].greedy for group in self.groups if group[0].greedy is not None]

    @property
    def media_bytes(self) -> int:
        """Bytes of Ray's object store that the media of all groups take."""
        refs = {item.ref.key: item.ref for group in self.groups for sample in group for item in sample.media}
        return sum(ref.nbytes for ref in refs.values())

    def rewarded(self) -> list[list[Sample]]:
        """Return the groups, with the rewards that a reward model gave, if there is one."""
        noted = iter(self.samples)
        return [[_rewarded(sample, next(noted)) for sample in group] for group in self.groups]


def _rewarded(sample: Sample, trained: TrainingSample) -> Sample:
    if sample.reward is not None:
        return sample
    value = trained.logged["reward"]
    return replace(sample, reward=Score(reward=value, score=value, parts={}))


@dataclass(frozen=True, kw_only=True)
class MadeRollout:
    """The rollout of a step."""

    rollout: Rollout
    is_whole: bool
    """Whether it has all groups of a step; only the last rollout may not."""
    position: Mapping[str, Any]
    """The place in the prompts after it, from which a run resumes that has trained on it."""
    began: float
    ended: float
    """When its generation began and ended, by `time.perf_counter`."""
    solved: float | None = None
    """How often prompts were solved so far, measured by a curriculum; None without one."""
    waited_s: float = 0.0
    """How long the engines were idle before it, because it would have been too far ahead of the update."""


Make = Callable[[int], MadeRollout | None]
"""Makes the rollout of a step, counted from 1; returns None if too few prompts are left."""


class RolloutsInTurn:
    """Makes each rollout when it is taken."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def start(self, step: int) -> None:
        """Do nothing: no rollout begins ahead."""

    def take(self, step: int) -> MadeRollout | None:
        """Return the rollout of this step; None after the last one."""
        return self._make(step)

    def replacing(self) -> AbstractContextManager[None]:
        """Return a block in which the engines' weights may be replaced: no rollout is under way."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing: no rollout is under way."""


class RolloutsAhead:
    """Makes rollouts in a thread of its own, up to `ahead` that are not taken yet.

    The next one begins when one is taken, after the update on the previous one. When a sample is trained on, the weights
    that generated it are therefore at most `ahead` updates old.
    """

    def __init__(self, make: Make, *, ahead: int, across_updates: bool) -> None:
        """Make a source.

        Args:
            across_updates: whether weights are replaced during a rollout; if not, `replacing` waits for its end.
        """
        self._make = make
        self._across_updates = across_updates
        self._changed = threading.Condition()
        self._room = ahead
        self._ready: deque[MadeRollout | None | BaseException] = deque()
        self._making = self._replacing = self._closed = False
        self._waited_s = self._idle_s = 0.0

    def start(self, step: int) -> None:
        """Begin, with the rollout of this step."""
        threading.Thread(target=self._run, args=(step,), name="rollouts", daemon=True).start()

    def take(self, step: int) -> MadeRollout | None:
        """Return the next rollout as soon as it is there, None after the last one; raises what its generation raised."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            made = self._ready.popleft()
            self._room += 1
            self._changed.notify_all()
        self._waited_s += time.perf_counter() - began
        if isinstance(made, BaseException):
            raise made
        return made

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Wait for the current rollout to end, unless rollouts continue across updates; begin none in the block."""
        began = time.perf_counter()
        with self._changed:
            # Set this first: the next rollout would begin at once.
            self._replacing = True
            self._changed.wait_for(lambda: self._across_updates or not self._making)
        self._waited_s += time.perf_counter() - began
        try:
            yield
        finally:
            with self._changed:
                self._replacing = False
                self._changed.notify_all()

    def take_waited(self) -> float:
        """Return how many seconds the trainer has waited for rollouts since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """Begin no more rollouts; the current one ends with the process, or with its engines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self, step: int) -> None:
        try:
            while self._is_next_due():
                made = self._make(step)
                self._hand_over(made and replace(made, waited_s=self._idle_s))
                if made is None or not made.is_whole:
                    return
                step += 1
        except BaseException as error:  # `take` raises it
            self._hand_over(error)

    def _is_next_due(self) -> bool:
        """Wait until the next rollout may begin; say whether one is still wanted."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._room and not self._replacing))
            if self._closed:
                return False
            self._room -= 1
            self._making = True
        self._idle_s = time.perf_counter() - began
        return True

    def _hand_over(self, made: MadeRollout | None | BaseException) -> None:
        with self._changed:
            self._making = False
            self._ready.append(made)
            self._changed.notify_all()


def ages(samples: Sequence[Sample], *, updates: int) -> dict[str, float]:
    """Return the metrics of how old the weights were that generated a step's samples.

    Args:
        updates: how many updates the policy had before the step.
    """
    staleness = [updates - sample.weight_version for sample in samples]
    return {
        "async/staleness_mean": fmean(staleness),
        "async/staleness_max": max(staleness),
        "async/stale_samples": fmean(age > 0 for age in staleness),
        "async/partial_samples": fmean(len(sample.weights) > 1 for sample in samples),
    }


def with_all_logs(groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Return a step's groups with all values that episodes log in the parts of all samples, 0 for those without."""
    names = sorted(
        {name for group in groups for sample in group if sample.played is not None for name in sample.played.logs}
    )
    if not names:
        return [list(group) for group in groups]
    return [[_with_logs(sample, names) for sample in group] for group in groups]


def _with_logs(sample: Sample, names: Sequence[str]) -> Sample:
    if sample.played is None or sample.reward is None:
        return sample
    logs = {f"agent/{name}": sample.played.logs.get(name, 0.0) for name in names}
    return replace(sample, reward=replace(sample.reward, parts={**sample.reward.parts, **logs}))


def check_parts(groups: Sequence[Sequence[Sample]]) -> None:
    """Raise UserError if the rewards of a step have different parts: their means would cover only some samples."""
    samples = [sample for group in groups for sample in group if sample.reward is not None]
    for sample in samples:
        first, own = (set(one.scored.parts) for one in (samples[0], sample))
        if first != own:
            known, found = (", ".join(sorted(names)) or "none" for names in (first, own))
            raise UserError(
                f"{sample.row.location}: --reward.remote_url gives a response the parts {found}, and one to "
                f"{samples[0].row.location} the parts {known}; give all responses the same parts, 0.0 for one that does not apply"
            )


def check_loss_tokens(groups: Sequence[Sequence[Sample]]) -> None:
    """Raise UserError if the loss leaves out all tokens of a step: an environment constrains every turn."""
    samples = [sample for group in groups for sample in group]
    if samples and not any(segment.in_loss for sample in samples for segment in sample.segments):
        raise UserError(
            f"{samples[0].row.location}: a step of {len(samples)} samples has nothing to train on. Each turn had to match a "
            "regular expression, and the loss leaves such turns out; let the environment give TurnOptions.regex only to "
            "some turns"
        )
