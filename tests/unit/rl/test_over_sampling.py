"""More groups under way than a step takes: which groups are in which rollout, worked out by hand, and what a kill leaves.

Engines are a clock: a group takes as many ticks as a table says, and ticks only while the engines are not held up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from helpers.conversations import message, row
from helpers.rl_steps import KillableRun, Killed, NotedEngine, play_steps, small_run, without_workers
from helpers.samples import of_answer

from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.group import GroupSettings
from lmm_r1.rl.filtering import GroupFilter
from lmm_r1.rl.oversampling import GroupsUnderWay, OversamplingGenerator, StartedGroup, samples_generator
from lmm_r1.rl.rollouts import KitSamplesGenerator, Rollout, group_settings

BATCH = 2


class Clock(OversamplingGenerator):
    """Groups that take as many ticks as `ticks` says of their rows, 1 where it says nothing; rows called `!...` are dropped."""

    ticks: Mapping[str, int] = {}

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.now, self.ends, self.begun = 0, {}, []

    def _begun(self, row: Row, settings: GroupSettings, *, place: int) -> StartedGroup:
        assert not self._held_up
        self.begun.append(row.location)
        self.ends[row.location] = self.now + self.ticks.get(row.location, 1)
        return StartedGroup(row=row, place=place, engine=0, ref=row)

    def _await_some(self, groups: Sequence[StartedGroup]) -> None:
        assert not self._held_up
        self.now = max(self.now, min(self.ends[group.row.location] for group in groups))
        for group in groups:
            if self.ends[group.row.location] <= self.now:
                scores = (1.0, 1.0) if group.row.location.startswith("!") else (0.0, 1.0)
                group.samples = [of_answer(group.row, score=score) for score in scores]

    def generate(self, rows: Sequence[Row], settings: GroupSettings, **others: object) -> list[list[Sample]]:
        assert not self._held_up
        return [[of_answer(item, score=1.0)] for item in rows]


class ScriptedTrainer(KillableRun):
    """Notes the prompts of each step, and what it would save."""

    def train_step(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        if step == self.killed_in:
            raise Killed
        self.learnt.append(list(dict.fromkeys(sample.location for sample in rollout.samples)))
        self.learner.send_weights()
        return {}


def rows_of(names: str) -> list[Row]:
    return [replace(row(message("user", "?")), location=name) for name in names.split()]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What all engines are asked for, in order."""
    asked: list[str] = []
    monkeypatch.setattr(ray, "get", lambda refs, timeout=None: refs)
    play_steps(monkeypatch)
    return asked


@pytest.fixture
def scripted(tmp_path: Path, calls: list[str]) -> Callable[..., ScriptedTrainer]:
    """A function that makes a trainer on prompts, which come in their order."""

    def made(
        names: str, *, ticks: Mapping[str, int] | None = None, episodes: int = 1, **flags: object
    ) -> ScriptedTrainer:
        own = {"rollout__oversample": 1.5, "train__num_episodes": episodes, "ckpt__output_dir": str(tmp_path)}
        config = small_run(prompts=BATCH, **{**own, **flags})
        trainer = without_workers(ScriptedTrainer, config, rows_of(names), folder=tmp_path)
        trainer.learnt, trainer.logged, trainer.saved = [], [], []
        trainer.prompts._order = list(range(len(trainer.prompts.rows)))
        trainer.prompts._order_of = lambda episode: list(range(len(trainer.prompts.rows)))
        under_way = GroupsUnderWay(factor=1.5, most_held=config.rollout.oversample_max_held)
        engine = NotedEngine(lambda name: name == "set_weight_version" or calls.append(name))
        trainer.learner.engines = [engine]
        trainer.learner.generator = Clock(config, [engine], group_settings(config), under_way=under_way)
        trainer.learner.generator.ticks = ticks or {}
        trainer.recorder = SimpleNamespace(step=lambda step, metrics, rollout: trainer.logged.append(metrics))
        trainer.learner.models.policy.broadcast = lambda: calls.append("new weights")
        return trainer

    return made


def test_a_rollout_ends_with_the_groups_that_finish_first_and_the_others_are_in_the_next(scripted, calls):
    # Three are under way together. Behind two ticks a and c are there; b has 8 to go, and is waited for in the second step,
    # in which e has ended, too, and has no room: it is the first of the third.
    run = scripted("a b c d e f", ticks={"b": 10, "c": 2, "f": 3})
    assert run.fit() == 3
    assert run.learnt == [["a", "c"], ["d", "b"], ["e", "f"]]
    assert run.learner.generator.begun == ["a", "b", "c", "d", "e", "f"]
    assert run.learner.generator.now == 2 + 8 + 3
    assert [status["rollout/held_over_groups"] for status in run.logged] == [1, 1, 0]
    # e has ended: nothing has to be held up, and behind the last step there is nothing.
    assert calls == ["pause_generation", "new weights", "resume_generation", "new weights", "new weights"]


def test_of_a_stream_that_ends_every_prompt_is_used_once_in_each_episode(scripted):
    # Of five prompts an episode's steps take four, as without over-sampling.
    run = scripted("a b c d e", ticks={"a": 9, "d": 7}, episodes=2)
    assert run.fit() == run.total_steps == 4
    assert sorted(name for step in run.learnt for name in step) == sorted("abcd" * 2)
    assert all(len(step) == BATCH for step in run.learnt)


@pytest.mark.parametrize("killed_in", range(1, 5))
def test_a_killed_run_begins_anew_what_was_under_way_and_loses_and_repeats_no_prompt(scripted, killed_in):
    ticks = {"b": 10, "c": 2, "f": 30}
    killed = scripted("a b c d e f g h", ticks=ticks)
    killed.killed_in = killed_in
    with pytest.raises(Killed):
        killed.fit()
    again = scripted("a b c d e f g h", ticks=ticks)
    if killed.saved:
        state = killed.saved[-1]["data_loader_state_dict"]
        again.step = killed.saved[-1]["global_step"]
        again.prompts.load_state_dict(state)
        again.learner.generator.under_way.load_state_dict(state)
    assert again.fit() == 4
    assert sorted(name for step in killed.learnt + again.learnt for name in step) == list("abcdefgh")
    if killed_in == 2:
        assert killed.saved[-1]["data_loader_state_dict"] == {"episode": 0, "position": 3, "under_way": [1]}
        assert again.learner.generator.begun == ["b", "d", "e", "f", "g", "h"]


def test_what_is_dropped_is_replaced_and_the_tail_is_held_over_beside_it(calls):
    prompts = PromptStream(rows_of("!a b !c d e f"), seed=0, episodes=1)
    prompts._order = list(range(6))
    generator = made(ticks={"b": 5, "e": 2}, calls=calls, group_filter=GroupFilter(bounds=(0.0, 1.0)))
    rollout = generator.rollout(prompts, count=BATCH)
    # For both dropped ones another is begun at once; d ends at 2, e at 3, before b.
    assert [group[0].row.location for group in rollout.groups] == ["d", "e"]
    assert (rollout.filtered, rollout.held_over, generator.now) == (2, 1, 3)
    assert generator.begun == ["!a", "b", "!c", "d", "e"]
    bounded = made(calls=calls, group_filter=GroupFilter(bounds=(0.0, 1.0), max_batches=1))
    prompts = PromptStream(rows_of("!a !b c d"), seed=0, episodes=1)
    prompts._order = list(range(4))
    with pytest.raises(
        UserError, match="^2 prompts, --algo.dynamic_filtering_max_batches 1 .* gave 0 of the 2 groups"
    ):
        bounded.rollout(prompts, count=BATCH)


def made(ticks: Mapping[str, int] | None = None, *, calls: list[str], **settings: Any) -> Clock:
    args = SimpleNamespace(
        vllm=SimpleNamespace(enable_sleep=True, speculative_tokens=0),
        logger=SimpleNamespace(rollouts_per_step=0),
        reward=SimpleNamespace(deadline_s=300.0),
    )
    sampling = SamplingSettings(n_samples=2, temperature=1.0, top_p=1.0, max_new_tokens=4)
    room = GroupSettings(
        sampling=sampling, max_len=16, logprobs=False, ignore_eos=False, overlong_prompts="skip", media=True
    )
    clock = Clock(
        args, [NotedEngine(calls.append)], room, under_way=GroupsUnderWay(factor=1.5, most_held=1), **settings
    )
    clock.ticks = ticks or {}
    return clock


def test_engines_that_sleep_are_held_up_before_and_an_evaluation_lets_them_go_on(calls):
    generator = made(ticks={"b": 5}, calls=calls)
    prompts = PromptStream(rows_of("a b c d"), seed=0, episodes=1)
    prompts._order = list(range(4))
    generator.rollout(prompts, count=BATCH)
    generator.evaluate(rows_of("x"), temperature=0.0, n_samples=1)
    generator.rollout(prompts, count=BATCH)
    assert calls == [
        *("wake_up", "pause_generation", "sleep"),
        *("wake_up", "resume_generation", "pause_generation", "sleep"),
        *("wake_up", "resume_generation", "sleep"),
    ]


@pytest.mark.parametrize(("oversample", "kind"), [(1.0, KitSamplesGenerator), (1.25, OversamplingGenerator)])
def test_groups_are_generated_in_excess_where_the_flag_says_so(oversample, kind):
    config = small_run(prompts=BATCH, rollout__oversample=oversample)
    assert type(samples_generator(config, [], leave_out=print)) is kind
