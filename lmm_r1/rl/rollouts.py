"""What a step generates: prompts go to the engines, and groups of scored samples come back."""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import ray

from lmm_r1.config import PPOConfig
from lmm_r1.config.rewards import PartWeight, WeightedPart, part_weights
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.engine_arguments import Guesses
from lmm_r1.generation.group import GroupSettings, SampledGroup
from lmm_r1.rl.filtering import DroppedGroup, Gathered, GroupFilter
from lmm_r1.rl.model_groups import worker_errors
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.scoring import Moment
from remote_rm.verifier import Score

# How many times more groups bring pictures than are recorded: some may be dropped.
_SPARE = 4


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


class KitSamplesGenerator:
    """Generates groups on all engines, the least busy first, and replaces the groups that are dropped."""

    def __init__(
        self,
        config: PPOConfig,
        engines: Sequence[Any],
        settings: GroupSettings,
        *,
        part_weights: Sequence[PartWeight] = (),
        group_filter: GroupFilter | None = None,
        leave_out: Callable[[str], object] = lambda reason: None,
    ) -> None:
        """Args:
        group_filter: None keeps all groups.
        leave_out: gets the reason if a prompt cannot be encoded and the run continues without it.
        """
        self.config = config
        self.vllm_engines = list(engines)
        self.settings = settings
        self.part_weights = part_weights
        self.group_filter = group_filter or GroupFilter()
        self.leave_out = leave_out
        # Groups of prompts that cannot be encoded, which no step has counted yet.
        self._refused = 0

    def rollout(self, prompts: PromptStream, *, count: int, moment: Moment | None = None) -> Rollout:
        """Return `count` groups of the stream's next prompts, fewer if its last episode ends.

        Dropped groups are replaced, if necessary from the next episode. Raises UserError if a whole episode of
        consecutive prompts gave no group, and if `--algo.dynamic_filtering_max_batches` times `count` prompts have not
        filled the step.

        Args:
            moment: the step that they are scored in; the same for groups that replace dropped ones.
        """
        settings = self._settings_at(moment)
        before = self._guesses()
        gathered = Gathered(count=count, filter=self.group_filter, recorded=self.config.logger.rollouts_per_step)
        with self._awake():
            self._gather(gathered, prompts, settings)
        groups = with_all_parts(gathered.groups)
        members = [(number, sample) for number, group in enumerate(groups) for sample in group]
        max_len, logs_masked = self.settings.max_len, self.group_filter.masks
        return Rollout(
            samples=[
                TrainingSample.of(sample, place=place, group=number, max_len=max_len, logs_masked=logs_masked)
                for place, (number, sample) in enumerate(members)
            ],
            groups=groups,
            overlong=gathered.overlong,
            refused=gathered.refused,
            dropped=tuple(gathered.dropped),
            part_weights=settings.part_weights,
            guesses=None if before is None or (now := self._guesses()) is None else now.since(before),
        )

    def evaluate(self, rows: Sequence[Row], *, moment: Moment | None = None, **sampling: Any) -> list[list[Sample]]:
        """Return the groups of held-out rows.

        Args:
            sampling: fields of `SamplingSettings` that are not the rollout's.
        """
        own = replace(self.settings.sampling, **sampling)
        settings = replace(
            self.settings, sampling=own, logprobs=False, media=False, moment=moment, branches=1, greedy=False
        )
        # No step counts held-out rows.
        refused = self._refused
        with self._awake():
            groups = self.generate(rows, settings)
        self._refused = refused
        return groups

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Let the engines generate within the block."""
        sleeps = self.config.vllm.enable_sleep
        if sleeps:
            # Engines that woke up for new weights get the memory of their KV cache.
            ray.get([engine.wake_up.remote() for engine in self.vllm_engines])
        yield
        if sleeps:
            ray.get([engine.sleep.remote() for engine in self.vllm_engines])

    def _gather(self, gathered: Gathered, prompts: PromptStream, settings: GroupSettings) -> None:
        """Fill a step in rounds: each replaces the groups that the one before dropped."""
        while gathered.missing:
            rows = prompts.take(min(gathered.missing, gathered.room))
            if not rows:
                if prompts.next_episode():
                    continue
                break
            first = gathered.asked
            gathered.asked += len(rows)
            found = self.generate(rows, settings, first=first)
            for group in found:
                self._add(gathered, group, settings)
            gathered.check(rows=len(prompts.rows), max_len=self.settings.max_len)

    def _add(self, gathered: Gathered, group: list[Sample], settings: GroupSettings) -> None:
        refused = not group and self._refused > 0
        self._refused -= refused
        gathered.add(group, refused=refused, step=None if settings.moment is None else settings.moment.step)

    def _guesses(self) -> Guesses | None:
        """Return the counts of speculative decoding so far; None if the engines do not use it."""
        if not self.config.vllm.speculative_tokens:
            return None
        return sum(ray.get([engine.guesses_so_far.remote() for engine in self.vllm_engines]), start=Guesses())

    def _settings_at(self, moment: Moment | None) -> GroupSettings:
        if moment is None:
            assert not self.part_weights, "weights depend on the step"
            return self.settings
        weights = tuple(weight.at(moment.step) for weight in self.part_weights)
        return replace(self.settings, moment=moment, part_weights=weights)

    def generate(self, rows: Sequence[Row], settings: GroupSettings, *, first: int = 0) -> list[list[Sample]]:
        """Return one group per row, in row order.

        The engines get at most `--rollout.vllm_generate_batch_size` prompts at a time, if that is less than a step has.
        Raises UserError if a reward cannot be obtained or a row is wrong: the run cannot continue without it.

        Args:
            first: the place of the first row among those of its step.
        """
        loads = list(ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines]))
        refs: list[Any] = []
        engine_of: dict[Any, int] = {}
        asked, samples = self.config.rollout.vllm_generate_batch_size, settings.sampling.n_samples
        limit = asked if asked is not None and asked < self.config.rollout.batch_size else len(rows)
        with worker_errors():
            for place, row in enumerate(rows):
                if len(engine_of) == limit:
                    [done], _ = ray.wait(list(engine_of), num_returns=1)
                    ray.get(done)
                    loads[engine_of.pop(done)] -= samples
                index = loads.index(min(loads))
                loads[index] += samples
                own = self._of_row(settings, place=place, first=first)
                refs.append(self.vllm_engines[index].generate_group.remote(row, own))
                engine_of[refs[-1]] = index
            groups = list(map(self._samples_of, ray.get(refs)))
        assert all(len(group) in (0, samples) for group in groups), "engines give whole groups"
        return groups

    def _samples_of(self, group: SampledGroup) -> list[Sample]:
        """Return the samples of a group, and report a prompt that cannot be encoded."""
        if group.refused is not None:
            self._refused += 1
            self.leave_out(group.refused)
        return group.samples

    def _of_row(self, settings: GroupSettings, *, place: int, first: int = 0) -> GroupSettings:
        """Return the settings of a row's group: with its own seed, and with pictures only if it may be recorded.

        The seed follows from the run's, the step and the row's place, so that a resumed run draws what it would have drawn.
        """
        if settings.moment is not None:
            seed = zlib.crc32(f"{self.config.train.seed} {settings.moment} {first + place}".encode())
            settings = replace(settings, sampling=replace(settings.sampling, seed=seed))
        if not settings.pictures:
            return settings
        recorded = max(1, self.config.logger.rollouts_per_step // settings.sampling.n_samples)
        return replace(settings, pictures=place < _SPARE * recorded)


def group_settings(config: PPOConfig) -> GroupSettings:
    """Return how the groups of a run are generated."""
    return GroupSettings(
        sampling=SamplingSettings(
            n_samples=config.rollout.n_samples_per_prompt,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            max_new_tokens=config.rollout.max_new_tokens,
            top_k=config.rollout.top_k,
        ),
        max_len=config.data.max_len,
        logprobs=True,
        ignore_eos=config.rollout.ignore_eos,
        overlong_prompts=config.data.overlong_prompts,
        bad_rows=config.data.bad_rows,
        media=True,
        branches=config.agent.branches,
        pictures=config.train.plays and config.logger.rollouts_per_step > 0,
        greedy=config.algo.advantage.estimator == "remax",
    )


def with_all_parts(groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Return a step's groups whose rewards all have the same parts, with what episodes log; 0 for a part that one lacks."""
    own = [[_parts_of(sample) for sample in group] for group in groups]
    names = list(dict.fromkeys(name for group in own for parts in group for name in parts))
    return [
        [
            (
                sample
                if sample.reward is None
                else replace(
                    sample, reward=replace(sample.reward, parts={name: parts.get(name, 0.0) for name in names})
                )
            )
            for sample, parts in zip(group, its, strict=True)
        ]
        for group, its in zip(groups, own, strict=True)
    ]


def _parts_of(sample: Sample) -> dict[str, float]:
    logs = (
        {} if sample.played is None else {f"agent/{name}": value for name, value in sorted(sample.played.logs.items())}
    )
    return {} if sample.reward is None else {**sample.reward.parts, **logs}


def samples_generator(
    config: PPOConfig, engines: Sequence[Any], *, leave_out: Callable[[str], object]
) -> KitSamplesGenerator:
    """Return the generator of a run.

    Args:
        leave_out: gets the reason if a prompt cannot be encoded and the run continues without it.
    """
    return KitSamplesGenerator(
        config,
        engines,
        group_settings(config),
        part_weights=part_weights(config.reward),
        group_filter=GroupFilter.of(config),
        leave_out=leave_out,
    )


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
