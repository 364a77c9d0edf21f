"""What a step generates: prompts go to the engines, and groups of scored samples come back."""

from __future__ import annotations

import heapq
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import ray

from lmm_r1.config import PPOConfig
from lmm_r1.config.rewards import PartWeight, WeightedPart
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.engine_arguments import Guesses
from lmm_r1.generation.group import GroupSettings, SampledGroup
from lmm_r1.rl.filtering import DroppedGroup, Gathered, GroupFilter
from lmm_r1.rl.model_groups import sleep, wake, worker_errors
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.scoring import Moment
from remote_rm.verifier import Score

if TYPE_CHECKING:
    from lmm_r1.rl.ahead import ReferenceAhead

logger = logging.getLogger(__name__)

# How many times more groups bring pictures than are recorded: some may be dropped.
_SPARE = 4
# Rows that a warning names.
_ROWS_NAMED = 8


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

    @property
    def held_over(self) -> int:
        """How many groups have begun and continue in the next rollout."""
        return 0

    def rollout(
        self, prompts: PromptStream, *, count: int, moment: Moment | None = None, ahead: ReferenceAhead | None = None
    ) -> Rollout:
        """Return `count` groups of the stream's next prompts, fewer if its last episode ends.

        Dropped groups are replaced, if necessary from the next episode. Raises UserError if a whole episode of
        consecutive prompts gave no group, and if `--algo.dynamic_filtering_max_batches` times `count` prompts have not
        filled the step.

        Args:
            moment: the step that they are scored in; the same for groups that replace dropped ones.
            ahead: gets the samples of each kept group as soon as it is finished.
        """
        settings = self._settings_at(moment)
        before = self._guesses()
        gathered = Gathered(count=count, filter=self.group_filter, recorded=self.config.logger.rollouts_per_step)
        with self._awake():
            self._gather(gathered, prompts, settings, ahead)
        groups = with_all_logs(gathered.groups)
        check_parts(groups)
        return Rollout(
            samples=self._trained(groups),
            groups=groups,
            overlong=gathered.overlong,
            refused=gathered.refused,
            dropped=tuple(gathered.dropped),
            part_weights=settings.part_weights,
            guesses=None if before is None or (now := self._guesses()) is None else now.since(before),
            held_over=self.held_over,
            ahead=ahead,
        )

    def can_fill(self, prompts: PromptStream, *, count: int) -> bool:
        """Say whether `count` groups are left for a rollout; may begin the next episode."""
        return prompts.has(count)

    def position(self, prompts: PromptStream) -> Mapping[str, Any]:
        """Return the place in the prompts after what was generated."""
        return prompts.state_dict()

    def restore(self, prompts: PromptStream, position: Mapping[str, Any]) -> None:
        """Continue from a position."""
        prompts.load_state_dict(position)

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
        wake(self.vllm_engines, self.config)
        yield
        sleep(self.vllm_engines, self.config)

    def _gather(
        self, gathered: Gathered, prompts: PromptStream, settings: GroupSettings, ahead: ReferenceAhead | None
    ) -> None:
        """Fill a step in rounds: each replaces the groups that the one before dropped."""
        while gathered.missing:
            rows = prompts.take(min(gathered.missing, gathered.room))
            if not rows:
                if prompts.next_episode():
                    continue
                break
            first = gathered.asked
            gathered.asked += len(rows)
            finished = None if ahead is None else partial(self._hand_ahead, ahead, settings)
            found = self.generate(rows, settings, finished=finished, first=first)
            prompts.measured([solve_rate(group) for group in found])
            for group in found:
                self._add(gathered, group, settings)
            gathered.check(rows=len(prompts.rows), max_len=self.settings.max_len)

    def _add(self, gathered: Gathered, group: list[Sample], settings: GroupSettings) -> None:
        refused = not group and self._refused > 0
        self._refused -= refused
        gathered.add(group, refused=refused, step=_step_of(settings))

    def _hand_ahead(self, ahead: ReferenceAhead, settings: GroupSettings, group: list[Sample]) -> None:
        """Start the reference on a finished group that is kept; skip this if a user's function would be called twice."""
        if self.group_filter.function is not None or not group:
            return
        judged = self.group_filter.judged(group, step=_step_of(settings))
        if not isinstance(judged, str):
            ahead.add(self._trained([judged]))

    def _trained(self, groups: Sequence[Sequence[Sample]]) -> list[TrainingSample]:
        members = [(number, sample) for number, group in enumerate(groups) for sample in group]
        given: dict[str, Any] = {"max_len": self.settings.max_len, "logs_masked": self.group_filter.masks}
        return [
            TrainingSample.of(sample, place=place, group=number, **given)
            for place, (number, sample) in enumerate(members)
        ]

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

    def generate(
        self,
        rows: Sequence[Row],
        settings: GroupSettings,
        *,
        finished: Callable[[list[Sample]], None] | None = None,
        first: int = 0,
    ) -> list[list[Sample]]:
        """Return one group per row, in row order.

        The engines get at most `--rollout.vllm_generate_batch_size` prompts at a time, if that is less than a step has.
        Raises UserError if a reward cannot be obtained or a row is wrong: the run cannot continue without it.

        Args:
            finished: gets each group as soon as it has finished, in any order.
            first: the place of the first row among those of its step.
        """
        pending = ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])
        load = [(count, index) for index, count in enumerate(pending)]
        heapq.heapify(load)
        refs: list[Any] = []
        engine_of: dict[Any, int] = {}
        asked = self.config.rollout.vllm_generate_batch_size
        limit = asked if asked is not None and asked < self.config.rollout.batch_size else len(rows)
        with silence_watch(refs, rows, after_s=self.config.reward.deadline_s):
            for place, row in enumerate(rows):
                if len(engine_of) == limit:
                    [done], _ = ray.wait(list(engine_of), num_returns=1)
                    with worker_errors():
                        ray.get(done)
                    freed = engine_of.pop(done)
                    load = [(count - settings.sampling.n_samples * (index == freed), index) for count, index in load]
                    heapq.heapify(load)
                count, index = heapq.heappop(load)
                heapq.heappush(load, (count + settings.sampling.n_samples, index))
                own = self._of_row(settings, place=place, first=first)
                refs.append(self.vllm_engines[index].generate_group.remote(row, own))
                engine_of[refs[-1]] = index
            waiting = list(refs) if finished is not None else []
            while waiting and finished is not None:
                [done], waiting = ray.wait(waiting, num_returns=1)
                with worker_errors():
                    group = ray.get(done).samples
                finished(group)
            with worker_errors():
                groups = list(map(self._samples_of, ray.get(refs)))
        assert all(len(group) in (0, settings.sampling.n_samples) for group in groups), "engines give whole groups"
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


def solve_rate(group: Sequence[Sample]) -> float | None:
    """Return the mean score of a group; None if it has no samples, or no scores because a reward model gives them later."""
    scores = [sample.reward.score for sample in group if sample.reward is not None]
    return fmean(scores) if scores else None


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


@contextmanager
def silence_watch(refs: Sequence[Any], rows: Sequence[Row], *, after_s: float) -> Iterator[None]:
    """Warn during the block each time that no group has finished for a while, with the rows that the run waits for.

    An engine whose whole process hangs, for example in a regular expression of an environment, cannot report it.

    Args:
        refs: the references of the requested groups, in the order of `rows`; the list may grow.
    """
    over = threading.Event()
    threading.Thread(target=_watch, args=(over, refs, rows, after_s), name="silence watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(over: threading.Event, growing: Sequence[Any], rows: Sequence[Row], after_s: float) -> None:
    came = 0
    while not over.wait(after_s):
        if not (refs := list(growing)):
            continue
        ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        if len(ready) == came and waiting:
            row_of = dict(zip(refs, rows, strict=False))
            named = "; ".join(row_of[ref].location for ref in waiting[:_ROWS_NAMED])
            more = f" and {len(waiting) - _ROWS_NAMED} more" if len(waiting) > _ROWS_NAMED else ""
            logger.warning(
                "no group has come for %g s, and %d of %d are awaited (%s%s): if the responses are not that long, look "
                "at what gives rewards, and at the engines with LMM_R1_VERBOSE=1",
                after_s,
                len(waiting),
                len(refs),
                named,
                more,
            )
        came = len(ready)


def _step_of(settings: GroupSettings) -> int | None:
    return None if settings.moment is None else settings.moment.step
