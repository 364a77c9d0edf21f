"""Groups that are generated in excess: a step takes those that finish first, and the others continue in the next."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from lmm_r1.config import PPOConfig
from lmm_r1.config.rewards import part_weights
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.generation.group import GroupSettings
from lmm_r1.rl.filtering import Gathered, GroupFilter
from lmm_r1.rl.model_groups import worker_errors
from lmm_r1.rl.rollouts import KitSamplesGenerator, group_settings, silence_watch

if TYPE_CHECKING:
    from lmm_r1.rl.ahead import ReferenceAhead

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


class OversamplingGenerator(KitSamplesGenerator):
    """Starts more groups than a step takes, and pauses those that are not finished until the next one."""

    def __init__(self, config: PPOConfig, *given: Any, under_way: GroupsUnderWay | None = None, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self.under_way = under_way or GroupsUnderWay(
            factor=config.rollout.oversample, most_held=config.rollout.oversample_max_held
        )
        self._held_up = False

    @property
    def held_over(self) -> int:
        """How many groups have begun and continue in the next rollout."""
        return len(self.under_way.groups)

    def can_fill(self, prompts: PromptStream, *, count: int) -> bool:
        """Say whether `count` groups are left for a rollout, in the stream or under way."""
        return self.under_way.available(prompts, batch=count) >= count

    def position(self, prompts: PromptStream) -> Mapping[str, Any]:
        """Return the place in the prompts after what was generated, with the groups that are not finished."""
        return {**super().position(prompts), **self.under_way.state_dict()}

    def restore(self, prompts: PromptStream, position: Mapping[str, Any]) -> None:
        """Continue from a position."""
        super().restore(prompts, position)
        self.under_way.load_state_dict(position)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Let the engines generate within the block; groups that are held over for the next rollout continue."""
        with super()._awake():
            if self._held_up:
                ray.get([engine.resume_generation.remote() for engine in self.vllm_engines])
                self._held_up = False
            yield
            if self.under_way.unfinished:
                ray.get([engine.pause_generation.remote() for engine in self.vllm_engines])
                self._held_up = True

    def _gather(
        self, gathered: Gathered, prompts: PromptStream, settings: GroupSettings, ahead: ReferenceAhead | None
    ) -> None:
        """Fill a step with the first groups that finish of more than it takes."""
        under_way, batch = self.under_way, gathered.count
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
                if ahead is not None:
                    self._hand_ahead(ahead, settings, group.samples)
                self._add(gathered, group.samples, settings)
                gathered.check(rows=len(prompts.rows), max_len=self.settings.max_len)
        under_way.end_rollout()

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


def kept_tokens(samples: Iterable[Sample], *, updates: int) -> int:
    """Return how many of the samples' tokens were generated in earlier rollouts.

    Args:
        updates: how many updates the policy had before the step.
    """
    return sum(span.tokens for sample in samples for span in sample.weights if span.version < updates)


def samples_generator(
    config: PPOConfig, engines: Sequence[Any], *, leave_out: Callable[[str], object]
) -> KitSamplesGenerator:
    """Return the generator of a run.

    Args:
        leave_out: gets the reason if a prompt cannot be encoded and the run continues without it.
    """
    kind = OversamplingGenerator if config.rollout.oversample > 1 else KitSamplesGenerator
    return kind(
        config,
        engines,
        group_settings(config),
        part_weights=part_weights(config.reward),
        group_filter=GroupFilter.of(config),
        leave_out=leave_out,
    )
