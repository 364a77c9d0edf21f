"""The generator of a run's rollouts: prompts go to the engines, and groups of scored samples come back."""

from __future__ import annotations

import heapq
import logging
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import ray

from lmm_r1.config import PPOConfig
from lmm_r1.config.rewards import PartWeight, part_weights
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.engine_arguments import Guesses
from lmm_r1.generation.group import GroupSettings, SampledGroup
from lmm_r1.host.openrlhf import batch_vllm_engine_call
from lmm_r1.rl.groups import (
    KEEPS_ALL,
    DroppedGroup,
    DropReason,
    GroupFilter,
    GroupsUnderWay,
    StartedGroup,
    counts,
    dropped_group,
    rewards_summary,
)
from lmm_r1.rl.model_groups import sleep, wake, worker_errors
from lmm_r1.rl.outputs import ReferenceAhead
from lmm_r1.rl.rollouts import Rollout, check_loss_tokens, check_parts, with_all_logs
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.scoring import Moment

logger = logging.getLogger(__name__)

# How many times more groups bring pictures than are recorded: some may be dropped.
_SPARE = 4
# Rows that a warning names.
_ROWS_NAMED = 8


@dataclass(kw_only=True)
class _Gathered:
    """What a step has so far."""

    count: int
    """Groups that fill it."""
    groups: list[list[Sample]] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)
    overlong: int = 0
    refused: int = 0
    """Prompts that cannot be encoded."""
    in_vain: int = 0
    """Prompts since the last one whose group is trained on."""
    asked: int = 0
    """Prompts taken so far."""
    ahead: ReferenceAhead | None = None
    """Runs the reference on its groups as soon as they are finished."""

    @property
    def missing(self) -> int:
        return self.count - len(self.groups)


def _pass_over(reason: str) -> None:
    """Report nothing about a prompt that cannot be encoded."""


class KitSamplesGenerator:
    """Generates groups on all engines, the least busy first, and replaces the groups that are dropped."""

    def __init__(
        self,
        config: PPOConfig,
        engines: Sequence[Any],
        settings: GroupSettings,
        *,
        part_weights: Sequence[PartWeight] = (),
        group_filter: GroupFilter = KEEPS_ALL,
        under_way: GroupsUnderWay | None = None,
        leave_out: Callable[[str], object] = _pass_over,
    ) -> None:
        """Args:
        under_way: the groups that continue after a rollout; None for none.
        leave_out: gets the reason if a prompt cannot be encoded and the run continues without it.
        """
        self.config = config
        self.vllm_engines = list(engines)
        self.settings = settings
        self.part_weights = part_weights
        self.group_filter = group_filter
        self.under_way = under_way or GroupsUnderWay(factor=1, most_held=1)
        self.leave_out = leave_out
        self._held_up = False
        # Groups of prompts that cannot be encoded, which no step has counted yet.
        self._refused = 0

    @classmethod
    def of(
        cls, config: PPOConfig, engines: Sequence[Any], *, leave_out: Callable[[str], object]
    ) -> KitSamplesGenerator:
        """Return the generator of a run."""
        return cls(
            config,
            engines,
            group_settings(config),
            part_weights=part_weights(config.reward),
            group_filter=GroupFilter.of(config),
            under_way=GroupsUnderWay(factor=config.rollout.oversample, most_held=config.rollout.oversample_max_held),
            leave_out=leave_out,
        )

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
        wake(self.vllm_engines, self.config)
        gathered = _Gathered(count=count, ahead=ahead)
        gather = self._gather_beyond if self.under_way.used else self._gather
        gather(gathered, prompts, settings)
        sleep(self.vllm_engines, self.config)
        groups = with_all_logs(gathered.groups)
        check_parts(groups)
        check_loss_tokens(groups)
        return Rollout(
            samples=self._trained(groups),
            groups=groups,
            overlong=gathered.overlong,
            refused=gathered.refused,
            dropped=tuple(gathered.dropped),
            part_weights=settings.part_weights,
            guesses=None if before is None or (now := self._guesses()) is None else now.since(before),
            held_over=len(self.under_way.groups),
            ahead=ahead,
        )

    def can_fill(self, prompts: PromptStream, *, count: int) -> bool:
        """Say whether `count` groups are left for a rollout, in the stream or under way; may begin the next episode."""
        if not self.under_way.used:
            return prompts.has(count)
        return self.under_way.available(prompts, batch=count) >= count

    def position(self, prompts: PromptStream) -> dict[str, Any]:
        """Return the place in the prompts after what was generated, with the groups that are not finished."""
        return {**prompts.state_dict(), **self.under_way.state_dict()}

    def restore(self, prompts: PromptStream, position: Mapping[str, Any]) -> None:
        """Continue from a position."""
        prompts.load_state_dict(position)
        self.under_way.load_state_dict(position)

    def _gather(self, gathered: _Gathered, prompts: PromptStream, settings: GroupSettings) -> None:
        """Fill a step in rounds: each replaces the groups that the one before dropped."""
        while gathered.missing:
            rows = prompts.take(min(gathered.missing, self._room(gathered.asked, count=gathered.count)))
            if not rows:
                if prompts.next_episode():
                    continue
                break
            first = gathered.asked
            gathered.asked += len(rows)
            finished = partial(self._hand_ahead, gathered, settings)
            found = self.generate(rows, settings, finished=finished, first=first)
            prompts.measured([solve_rate(group) for group in found])
            for group in found:
                self._judge(group, gathered, settings)
            self._check_filling(gathered, prompts)

    def _gather_beyond(self, gathered: _Gathered, prompts: PromptStream, settings: GroupSettings) -> None:
        """Fill a step with the first groups that finish of more than it takes; pause the others for the next step."""
        under_way, batch = self.under_way, gathered.count
        self._go_on()
        refs, rows = [group.ref for group in under_way.groups], [group.row for group in under_way.groups]
        with silence_watch(refs, rows, after_s=self.config.reward.deadline_s):
            while True:
                for place, row in under_way.next_rows(prompts, batch=batch, taken=len(gathered.groups)):
                    under_way.groups.append(self._begun(row, self._of_row(settings, place=len(refs)), place=place))
                    refs.append(under_way.groups[-1].ref)
                    rows.append(row)
                group = under_way.take(room=gathered.missing)
                if group is None:
                    if not gathered.missing or not under_way.unfinished:
                        break
                    self._await_some(under_way.unfinished)
                    continue
                assert group.samples is not None, "`take` returns finished groups"
                gathered.asked += 1
                prompts.measured([solve_rate(group.samples)], places=[group.place])
                self._hand_ahead(gathered, settings, group.samples)
                self._judge(group.samples, gathered, settings)
                self._check_filling(gathered, prompts)
        under_way.end_rollout()
        self._hold_up()

    def _judge(self, group: list[Sample], gathered: _Gathered, settings: GroupSettings) -> None:
        """Count a group, and add it to those that are trained on or to those that are dropped."""
        gathered.in_vain += 1
        if not group and self._refused:
            self._refused -= 1
            gathered.refused += 1
            return
        if not group:
            gathered.overlong += 1
            return
        judged = self._judged(group, settings)
        if isinstance(judged, str):
            recorded = self._has_place(gathered.dropped)
            gathered.dropped.append(dropped_group(group, judged, recorded=recorded))
        else:
            gathered.groups.append(judged)
            gathered.in_vain = 0

    def _judged(self, group: list[Sample], settings: GroupSettings) -> list[Sample] | DropReason:
        """Return a group as it is trained on, or why it is dropped."""
        moment = settings.moment
        return self.group_filter.judged(group, step=None if moment is None else moment.step)

    def _hand_ahead(self, gathered: _Gathered, settings: GroupSettings, group: list[Sample]) -> None:
        """Start the reference on a finished group that is kept; skip this if a user's function would be called twice."""
        if gathered.ahead is None or self.group_filter.function is not None or not group:
            return
        judged = self._judged(group, settings)
        if not isinstance(judged, str):
            gathered.ahead.add(self._trained([judged]))

    def _trained(self, groups: Sequence[Sequence[Sample]]) -> list[TrainingSample]:
        members = [(number, sample) for number, group in enumerate(groups) for sample in group]
        given: dict[str, Any] = {"max_len": self.settings.max_len, "logs_masked": self.group_filter.masks}
        return [
            TrainingSample.of(sample, place=place, group=number, **given)
            for place, (number, sample) in enumerate(members)
        ]

    def _check_filling(self, gathered: _Gathered, prompts: PromptStream) -> None:
        """Raise UserError if a step cannot be filled."""
        in_vain, asked, count = gathered.in_vain, gathered.asked, gathered.count
        why = self.why_dropped(gathered.dropped, overlong=gathered.overlong, refused=gathered.refused)
        if in_vain >= len(prompts.rows):
            raise UserError(f"none of the last {in_vain} prompts, a whole episode, gave a group to train on: {why}")
        if gathered.missing and not self._room(asked, count=count):
            raise UserError(
                f"{asked} prompts, --algo.dynamic_filtering_max_batches {self.group_filter.max_batches} times "
                f"--rollout.batch_size, gave {len(gathered.groups)} of the {count} groups of a step: {why}"
            )

    def _begun(self, row: Row, settings: GroupSettings, *, place: int) -> StartedGroup:
        """Start a group on the engine with the fewest groups."""
        loads = Counter(group.engine for group in self.under_way.unfinished)
        engine = min(range(len(self.vllm_engines)), key=lambda index: loads[index])
        ref = self.vllm_engines[engine].generate_group.remote(row, settings)
        return StartedGroup(row=row, place=place, engine=engine, ref=ref)

    def _await_some(self, groups: Sequence[StartedGroup]) -> None:
        """Wait until at least one group has finished, and take the samples of all that have."""
        refs = [group.ref for group in groups]
        ray.wait(refs, num_returns=1)
        done = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        for group in groups:
            if group.ref in done:
                with worker_errors():
                    group.samples = self._samples_of(ray.get(group.ref))

    def _go_on(self) -> None:
        """Resume the engines, if they are paused."""
        if self._held_up:
            batch_vllm_engine_call(self.vllm_engines, "resume_generation")
            self._held_up = False

    def _hold_up(self) -> None:
        """Pause the engines, if they are generating groups of the next rollout."""
        if self.under_way.unfinished:
            batch_vllm_engine_call(self.vllm_engines, "pause_generation")
            self._held_up = True

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

    def _room(self, asked: int, *, count: int) -> int:
        """Return how many more prompts a step of `count` groups may take after those that it has taken."""
        return self.group_filter.max_batches * count - asked if self.group_filter.max_batches else sys.maxsize

    def _has_place(self, dropped: Sequence[DroppedGroup]) -> bool:
        """Say whether the samples of one more dropped group are recorded, as many as of kept groups."""
        kept = sum(len(group.samples) for group in dropped)
        limit, size = self.config.logger.rollouts_per_step, self.settings.sampling.n_samples
        return limit > 0 and (kept == 0 or kept + size <= limit)

    def why_dropped(self, dropped: Sequence[DroppedGroup], *, overlong: int, refused: int) -> str:
        """Return why a step's groups were dropped, which rewards they had, and what to do about it."""
        phrases = [self.group_filter.why(reason, count) for reason, count in counts(dropped).items()]
        if overlong:
            phrases.append(
                (f"{overlong} prompts left no room for a response", f"raise --data.max_len {self.settings.max_len}")
            )
        if refused:
            phrases.append((f"{refused} prompts cannot be encoded", "correct them: left_out_rows.jsonl lists them"))
        reasons = ", and ".join(reason for reason, _ in phrases)
        rewards = [f"of the dropped groups' rewards, {rewards_summary(dropped)}"] if dropped else []
        return "; ".join([reasons, *rewards, *dict.fromkeys(advice for _, advice in phrases)])

    def evaluate(self, rows: Sequence[Row], *, moment: Moment | None = None, **sampling: Any) -> list[list[Sample]]:
        """Return the groups of held-out rows; groups that are held over for the next rollout continue meanwhile.

        Args:
            sampling: fields of `SamplingSettings` that are not the rollout's.
        """
        wake(self.vllm_engines, self.config)
        self._go_on()
        own = replace(self.settings.sampling, **sampling)
        settings = replace(
            self.settings, sampling=own, logprobs=False, media=False, moment=moment, branches=1, greedy=False
        )
        refused = self._refused
        groups = self.generate(rows, settings)
        # No step counts held-out rows.
        self._refused = refused
        self._hold_up()
        sleep(self.vllm_engines, self.config)
        return groups

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
                "at what gives rewards, and at the engines with --logger.worker_logs",
                after_s,
                len(waiting),
                len(refs),
                named,
                more,
            )
        came = len(ready)
