"""From prompts to OpenRLHF's experiences: groups go to the engines, samples come back."""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import ray
import torch

from lmm_r1.config.rewards import PartWeight, WeightedPart
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.generation.engine_arguments import Guesses
from lmm_r1.generation.group import GroupSettings, SampledGroup
from lmm_r1.host.openrlhf import Experience
from lmm_r1.host.openrlhf_engines import batch_vllm_engine_call
from lmm_r1.rl.groups import (
    KEEPS_ALL,
    DroppedGroup,
    DropReason,
    GroupFilter,
    GroupsUnderWay,
    StartedGroup,
    counts,
    dropped_group,
    rewards_told,
)
from lmm_r1.rl.mismatch import modality_info, modality_of
from lmm_r1.rl.reference_ahead import ReferenceAhead
from lmm_r1.rl.silence import SilenceWatch
from lmm_r1.scoring.scored_response import Moment
from remote_rm.client import RewardUnavailable
from remote_rm.verifier import Score

# How many times more groups bring pictures than are recorded: some may be dropped.
_SPARE = 4


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What one step generated."""

    experiences: list[Experience]
    groups: list[list[Sample]]
    """The same samples as the engines returned them, for the records."""
    overlong: int
    """Prompts left out because they leave no room for a response."""
    refused: int = 0
    """Prompts left out because they cannot be encoded."""
    dropped: tuple[DroppedGroup, ...] = ()
    """Groups that filters left out."""
    part_weights: tuple[WeightedPart, ...] = ()
    """What parts of the rewards counted."""
    guesses: Guesses | None = None
    """Tokens that the engines guessed ahead; None where they do not."""
    held_over: int = 0
    """Groups that were begun, and go on in the next rollout."""
    ahead: ReferenceAhead | None = None
    """What the reference has begun to compute of it; None where it waits for the whole rollout."""

    @property
    def filtered(self) -> int:
        """How many groups filters left out."""
        return len(self.dropped)

    @property
    def locations(self) -> list[str]:
        """Where the prompt of each experience stands."""
        return [sample.row.location for group in self.groups for sample in group]

    @property
    def greedy(self) -> list[Sample]:
        """The greedy response to each group's prompt; empty where none is generated."""
        return [group[0].greedy for group in self.groups if group[0].greedy is not None]

    @property
    def media_bytes(self) -> int:
        """How much of Ray's object store the media of all groups take."""
        refs = {item.ref.key: item.ref for group in self.groups for sample in group for item in sample.media}
        return sum(ref.nbytes for ref in refs.values())

    def rewarded(self) -> list[list[Sample]]:
        """Return the groups, with the rewards of the experiences where a reward model gave them."""
        noted = iter(self.experiences)
        return [[_rewarded(sample, next(noted)) for sample in group] for group in self.groups]


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
    """Prompts since the last one that gave a group to learn from."""
    asked: int = 0
    """Prompts that it has taken."""
    ahead: ReferenceAhead | None = None
    """What gets its groups as soon as they are finished."""

    @property
    def missing(self) -> int:
        return self.count - len(self.groups)


def _pass_over(reason: str) -> None:
    """Tell nobody of a prompt that cannot be encoded."""


class KitSamplesGenerator:
    """Generates groups on all engines, the least busy first, and replaces the groups that are dropped."""

    def __init__(
        self,
        args: SimpleNamespace,
        engines: Sequence[Any],
        settings: GroupSettings,
        *,
        part_weights: Sequence[PartWeight] = (),
        group_filter: GroupFilter = KEEPS_ALL,
        under_way: GroupsUnderWay | None = None,
        leave_out: Callable[[str], object] = _pass_over,
    ) -> None:
        """Args:
        under_way: what goes on beyond a rollout; None is nothing.
        leave_out: is told why a prompt cannot be encoded that the run goes on without.
        """
        self.args = args
        self.vllm_engines = list(engines)
        self.settings = settings
        self.part_weights = part_weights
        self.group_filter = group_filter
        self.under_way = under_way or GroupsUnderWay(factor=1, most_held=1)
        self.leave_out = leave_out
        self._held_up = False
        # Groups without samples, and not for want of room, which no step has counted yet.
        self._refused = 0

    def rollout(
        self, prompts: PromptStream, *, count: int, moment: Moment | None = None, ahead: ReferenceAhead | None = None
    ) -> Rollout:
        """Return `count` groups of the stream's next prompts, fewer where its last episode ends.

        Groups that are dropped are replaced from the next episode where this one ends, so that what was gathered is
        never lost. Raises UserError where as many prompts as an episode has gave no group one after the other, and
        where `--algo.dynamic_filtering_max_batches` times `count` prompts have not filled the step.

        Args:
            moment: when in the run they are scored; of groups that replace dropped ones it is the same.
            ahead: gets the samples of each group that is kept as soon as it is finished.
        """
        settings = self._settings_at(moment)
        before = self._guesses()
        wake(self.args, self.vllm_engines)
        gathered = _Gathered(count=count, ahead=ahead)
        gather = self._gather_beyond if self.under_way.used else self._gather
        gather(gathered, prompts, settings)
        sleep(self.args, self.vllm_engines)
        groups = with_all_logs(gathered.groups)
        _check_parts(groups)
        _check_loss_tokens(groups)
        return Rollout(
            experiences=[experience for group in groups for experience in self._experiences(group)],
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
        """Say whether there are `count` groups for a rollout, of the stream or under way; it may move on to the next episode."""
        if not self.under_way.used:
            return prompts.has(count)
        return self.under_way.available(prompts, batch=count) >= count

    def _gather(self, gathered: _Gathered, prompts: PromptStream, settings: GroupSettings) -> None:
        """Fill a step in rounds: what was dropped in one, the next one replaces."""
        while gathered.missing:
            rows = prompts.take(min(gathered.missing, self._room(gathered.asked, count=gathered.count)))
            if not rows:
                if prompts.next_episode():
                    continue
                break
            gathered.asked += len(rows)
            found = self.generate(rows, settings, finished=partial(self._hand_ahead, gathered, settings))
            prompts.measured([solve_rate(group) for group in found])
            for group in found:
                self._judge(group, gathered, settings)
            self._check_filling(gathered, prompts)

    def _gather_beyond(self, gathered: _Gathered, prompts: PromptStream, settings: GroupSettings) -> None:
        """Fill a step with the groups that finish first of more than it takes; the others are held up, for the next one."""
        under_way, batch = self.under_way, gathered.count
        self._go_on()
        refs, rows = [group.ref for group in under_way.groups], [group.row for group in under_way.groups]
        with SilenceWatch(refs, rows, after_s=self.args.reward.deadline_s):
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
                assert group.samples is not None, "it has finished"
                gathered.asked += 1
                prompts.measured([solve_rate(group.samples)], places=[group.place])
                self._hand_ahead(gathered, settings, group.samples)
                self._judge(group.samples, gathered, settings)
                self._check_filling(gathered, prompts)
        under_way.end_rollout()
        self._hold_up()

    def _judge(self, group: list[Sample], gathered: _Gathered, settings: GroupSettings) -> None:
        """Put a group where it belongs: among those that are learnt from, or those that are dropped."""
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
        """Return a group as it is learnt from, or why it is dropped."""
        moment = settings.moment
        return self.group_filter.judged(group, step=None if moment is None else moment.step)

    def _hand_ahead(self, gathered: _Gathered, settings: GroupSettings, group: list[Sample]) -> None:
        """Let the reference begin with a finished group that is kept; a user's function is not asked twice."""
        if gathered.ahead is None or self.group_filter.function is not None or not group:
            return
        judged = self._judged(group, settings)
        if not isinstance(judged, str):
            gathered.ahead.add(self._experiences(judged))

    def _experiences(self, group: Sequence[Sample]) -> list[Experience]:
        return [
            experience_of(sample, max_len=self.settings.max_len, masks=self.group_filter.masks) for sample in group
        ]

    def _check_filling(self, gathered: _Gathered, prompts: PromptStream) -> None:
        """Raise UserError where a step cannot be filled."""
        in_vain, asked, count = gathered.in_vain, gathered.asked, gathered.count
        why = self.why_dropped(gathered.dropped, overlong=gathered.overlong, refused=gathered.refused)
        if in_vain >= len(prompts.rows):
            raise UserError(f"none of the last {in_vain} prompts, a whole episode, gave a group to learn from: {why}")
        if gathered.missing and not self._room(asked, count=count):
            raise UserError(
                f"{asked} prompts, --algo.dynamic_filtering_max_batches {self.group_filter.max_batches} times "
                f"--rollout.batch_size, gave {len(gathered.groups)} of the {count} groups of a step: {why}"
            )

    def _begun(self, row: Row, settings: GroupSettings, *, place: int) -> StartedGroup:
        """Let the engine that has the fewest groups make one."""
        loads = Counter(group.engine for group in self.under_way.unfinished)
        engine = min(range(len(self.vllm_engines)), key=lambda index: loads[index])
        ref = self.vllm_engines[engine].generate_group.remote(row, settings)
        return StartedGroup(row=row, place=place, engine=engine, ref=ref)

    def _await_some(self, groups: Sequence[StartedGroup]) -> None:
        """Wait until one of these has finished at least, and take the samples of all that have."""
        refs = [group.ref for group in groups]
        ray.wait(refs, num_returns=1)
        done = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        for group in groups:
            if group.ref in done:
                with told_by_workers():
                    group.samples = self._samples_of(ray.get(group.ref))

    def _go_on(self) -> None:
        """Let the engines go on with what they were held up in."""
        if self._held_up:
            batch_vllm_engine_call(self.vllm_engines, "resume_generation")
            self._held_up = False

    def _hold_up(self) -> None:
        """Hold the engines up where they are at groups of the next rollout."""
        if self.under_way.unfinished:
            batch_vllm_engine_call(self.vllm_engines, "pause_generation")
            self._held_up = True

    def _guesses(self) -> Guesses | None:
        """Return how many tokens the engines have guessed so far; None where they do not."""
        if not self.args.vllm.speculative_tokens:
            return None
        return sum(ray.get([engine.guesses_so_far.remote() for engine in self.vllm_engines]), start=Guesses())

    def _settings_at(self, moment: Moment | None) -> GroupSettings:
        if moment is None:
            assert not self.part_weights, "a weight is one of a step"
            return self.settings
        weights = tuple(weight.at(moment.step) for weight in self.part_weights)
        return replace(self.settings, moment=moment, part_weights=weights)

    def _room(self, asked: int, *, count: int) -> int:
        """Return how many prompts a step of `count` groups may still take, of which it has asked some."""
        return self.group_filter.max_batches * count - asked if self.group_filter.max_batches else sys.maxsize

    def _has_place(self, dropped: Sequence[DroppedGroup]) -> bool:
        """Say whether the samples of one more dropped group are recorded: those of the first ones, as of kept groups."""
        kept = sum(len(group.samples) for group in dropped)
        limit, size = self.args.logger.rollouts_per_step, self.settings.sampling.n_samples
        return limit > 0 and (kept == 0 or kept + size <= limit)

    def why_dropped(self, dropped: Sequence[DroppedGroup], *, overlong: int, refused: int) -> str:
        """Return why a step's groups were dropped, what their rewards look like, and what can be done about it."""
        told = [self.group_filter.why(reason, count) for reason, count in counts(dropped).items()]
        if overlong:
            told.append(
                (f"{overlong} prompts left no room for a response", f"raise --data.max_len {self.settings.max_len}")
            )
        if refused:
            told.append((f"{refused} prompts cannot be encoded", "correct them: left_out_rows.jsonl lists them"))
        reasons = ", and ".join(reason for reason, _ in told)
        rewards = [f"of the dropped groups' rewards, {rewards_told(dropped)}"] if dropped else []
        return "; ".join([reasons, *rewards, *dict.fromkeys(advice for _, advice in told)])

    def evaluate(
        self, rows: Sequence[Row], *, temperature: float, n_samples: int, moment: Moment | None = None
    ) -> list[list[Sample]]:
        """Return the groups of held-out rows, sampled as asked for; what is held over for the next rollout goes on meanwhile."""
        wake(self.args, self.vllm_engines)
        self._go_on()
        sampling = replace(self.settings.sampling, temperature=temperature, n_samples=n_samples)
        settings = replace(
            self.settings, sampling=sampling, logprobs=False, media=False, moment=moment, branches=1, greedy=False
        )
        refused = self._refused
        groups = self.generate(rows, settings)
        # Of held-out rows, which no step counts.
        self._refused = refused
        self._hold_up()
        sleep(self.args, self.vllm_engines)
        return groups

    def generate(
        self, rows: Sequence[Row], settings: GroupSettings, *, finished: Callable[[list[Sample]], None] | None = None
    ) -> list[list[Sample]]:
        """Return one group per row, in row order; by its prompt and the key of its media, passes know a group.

        The engines have `--rollout.vllm_generate_batch_size` prompts at one time, where that is less than a step's.
        Raises UserError when a reward cannot be had or a row is wrong; the run cannot go on without it.

        Args:
            finished: gets each group as soon as it is there, in any order.
        """
        pending = ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])
        load = [(count, index) for index, count in enumerate(pending)]
        heapq.heapify(load)
        refs: list[Any] = []
        engine_of: dict[Any, int] = {}
        asked = self.args.rollout.vllm_generate_batch_size
        limit = asked if asked < self.args.rollout.batch_size else len(rows)
        with SilenceWatch(refs, rows, after_s=self.args.reward.deadline_s):
            for place, row in enumerate(rows):
                if len(engine_of) == limit:
                    [done], _ = ray.wait(list(engine_of), num_returns=1)
                    with told_by_workers():
                        ray.get(done)
                    freed = engine_of.pop(done)
                    load = [(count - settings.sampling.n_samples * (index == freed), index) for count, index in load]
                    heapq.heapify(load)
                count, index = heapq.heappop(load)
                heapq.heappush(load, (count + settings.sampling.n_samples, index))
                refs.append(self.vllm_engines[index].generate_group.remote(row, self._of_row(settings, place=place)))
                engine_of[refs[-1]] = index
            waiting = list(refs) if finished is not None else []
            while waiting and finished is not None:
                [done], waiting = ray.wait(waiting, num_returns=1)
                with told_by_workers():
                    group = ray.get(done).samples
                finished(group)
            with told_by_workers():
                groups = list(map(self._samples_of, ray.get(refs)))
        assert all(len(group) in (0, settings.sampling.n_samples) for group in groups), "engines give whole groups"
        return groups

    def _samples_of(self, group: SampledGroup) -> list[Sample]:
        """Return the samples of a group, and tell of a prompt that cannot be encoded."""
        if group.refused is not None:
            self._refused += 1
            self.leave_out(group.refused)
        return group.samples

    def _of_row(self, settings: GroupSettings, *, place: int) -> GroupSettings:
        """Return how the group of a row is generated: with pictures only where it may be recorded."""
        if not settings.pictures:
            return settings
        recorded = max(1, self.args.logger.rollouts_per_step // settings.sampling.n_samples)
        return replace(settings, pictures=place < _SPARE * recorded)


def experience_of(sample: Sample, *, max_len: int, masks: bool = False) -> Experience:
    """Return a sample as OpenRLHF trains on it: a batch of one, whose masks and log-probs are about the token after each.

    Its `info` holds what OpenRLHF logs the means of.

    Args:
        masks: whether single responses may be masked, too, and not episodes alone.
    """
    token_ids, log_probs = sample.token_ids, sample.log_probs
    assert len(token_ids) <= max_len, f"{sample.row.location}: no engine gives {len(token_ids)} of {max_len} tokens"
    reward = sample.reward
    info = {"response_clip_ratio": torch.tensor([len(token_ids) == max_len])}
    if reward is not None:
        values = {"reward": reward.reward, "score": reward.score, **reward.parts}
        info |= {name: torch.tensor([value]) for name, value in values.items()}
    if masks or sample.played is not None:
        info["masked"] = torch.tensor([sample.masked])
    return Experience(
        sequences=torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        action_mask=torch.tensor([sample.loss_mask[1:]]).long(),
        rollout_log_probs=None if log_probs is None else torch.tensor([log_probs[1:]]),
        prompts=[sample.prompt],
        labels=[sample.label],
        images=[None],
        mm_train_inputs=[sample.media or None],
        rewards=None if reward is None else torch.tensor([reward.reward]),
        scores=None if reward is None else torch.tensor([reward.score]),
        response_length=torch.tensor([sample.generated_tokens]),
        truncated=torch.tensor([sample.truncated]),
        total_length=torch.tensor([float(len(token_ids))]),
        info=info | modality_info(modality_of(sample.row)),
    )


def _rewarded(sample: Sample, experience: Experience) -> Sample:
    if sample.reward is not None:
        return sample
    value = experience.info["reward"].item()
    return replace(sample, reward=Score(reward=value, score=value, parts={}))


def solve_rate(group: Sequence[Sample]) -> float | None:
    """Return the mean score of a group, None where there is none: of an overlong prompt, or before a reward model gives it."""
    scores = [sample.reward.score for sample in group if sample.reward is not None]
    return fmean(scores) if scores else None


@contextmanager
def told_by_workers(*, before: str = "") -> Iterator[None]:
    """Raise what a worker or an engine has to say to the user as a UserError of this process.

    Args:
        before: what stands in front of its message.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RewardUnavailable | UserError):
            raise UserError(f"{before}{error.cause}") from error
        raise


def wake(args: SimpleNamespace, engines: Sequence[Any]) -> None:
    """Give sleeping engines their memory back; those that were woken for new weights get that of their cache."""
    if args.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "wake_up")


def sleep(args: SimpleNamespace, engines: Sequence[Any]) -> None:
    """Free the engines' memory while the models train."""
    if args.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "sleep")


def with_all_logs(groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Return a step's groups with what some of their environments' episodes log in the parts of all, 0 where one does not."""
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


def _check_parts(groups: Sequence[Sequence[Sample]]) -> None:
    """Raise UserError where rewards of a step have other parts than the first: their means would be about some only."""
    samples = [sample for group in groups for sample in group if sample.reward is not None]
    for sample in samples:
        first, own = (set(one.scored.parts) for one in (samples[0], sample))
        if first != own:
            known, found = (", ".join(sorted(names)) or "none" for names in (first, own))
            raise UserError(
                f"{sample.row.location}: --reward.remote_url gives a response the parts {found}, and one to "
                f"{samples[0].row.location} the parts {known}; give all responses the same, 0.0 where one does not apply"
            )


def _check_loss_tokens(groups: Sequence[Sequence[Sample]]) -> None:
    """Raise UserError where the loss leaves out all of a step: an environment constrains every turn."""
    samples = [sample for group in groups for sample in group]
    if samples and not any(segment.in_loss for sample in samples for segment in sample.segments):
        raise UserError(
            f"{samples[0].row.location}: there is nothing to learn from in a step of {len(samples)} samples, as each of their "
            "turns was to match a regular expression, and the loss leaves such turns out; let the environment give "
            "TurnOptions.regex to some turns alone"
        )
