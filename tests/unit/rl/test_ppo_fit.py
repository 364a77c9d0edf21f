"""The RL loop over prompts that are filtered: what is gathered is learnt from, and what is left out is told."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from helpers.conversations import message, row
from helpers.rl_steps import play_steps, small_run, without_workers
from helpers.samples import of_answer

from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.rl.filtering import GroupFilter
from lmm_r1.rl.loop import RLRun
from lmm_r1.rl.rollouts import KitSamplesGenerator, Rollout, group_settings

BATCH = 3


class PlayedGenerator(KitSamplesGenerator):
    """Gives groups whose scores are their prompt's answer, up to a number of prompts, behind which it fails."""

    def __init__(self, *arguments: Any, limit: int | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.limit = limit
        self.asked = self.different = 0

    def generate(self, rows: Sequence[Row], settings: object, **others: object) -> list[list[Sample]]:
        self.asked += len(rows)
        if self.limit is not None and self.asked > self.limit:
            raise UserError("the reward server is gone")
        self.different += sum(_scores(item) == (0.0, 1.0) for item in rows)
        return [[of_answer(item, score=score) for score in _scores(item)] for item in rows]


def _scores(item: Row) -> tuple[float, float]:
    return {"right": (1.0, 1.0), "wrong": (0.0, 0.0)}.get(item.answer, (0.0, 1.0))


class PlayedTrainer(RLRun):
    """Keeps what it would learn from in each step, and the states that it would save."""

    def train_step(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        self.learnt.append([sample.location for sample in rollout.samples])
        return {}

    def _save_before_stop(self, states: dict[str, Any]) -> None:
        self.saved = states


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function from the answers of a run's prompts to its trainer."""
    monkeypatch.setattr(ray, "get", lambda refs, timeout=None: refs)
    play_steps(monkeypatch)

    def made(answers: Sequence[str], *, episodes: int = 1, limit: int | None = None, **more: object) -> PlayedTrainer:
        own = {"algo__dynamic_filtering_enable": True, "ckpt__output_dir": str(tmp_path)}
        config = small_run(prompts=BATCH, train__num_episodes=episodes, **{**own, **more})
        rows = [
            replace(row(message("user", "?"), answer=answer), location=f"line {line}")
            for line, answer in enumerate(answers, start=1)
        ]
        played = without_workers(PlayedTrainer, config, rows, folder=tmp_path)
        played.learner.generator = PlayedGenerator(
            config, [], group_settings(config), limit=limit, group_filter=GroupFilter.of(config)
        )
        played.learnt, played.filtered, played.saved = [], [], None
        played.recorder = SimpleNamespace(
            step=lambda step, metrics, rollout: played.filtered.append(rollout.filtered),
            evaluation=lambda step, groups: {},
        )
        played.checkpoints = SimpleNamespace(save=lambda step, states: None, loaded_states=dict)
        return played

    return made


MIXED = ["a", "wrong", "b", "right", "c", "d", "right", "e"]


def test_every_group_that_differs_is_learnt_from_and_the_others_are_counted(trainer):
    run = trainer(MIXED, episodes=3)
    steps = run.fit()
    # Without the prompts at the ends of episodes that are too few for a step, five of eight are learnt from.
    assert steps >= 4
    assert [len(labels) for labels in run.learnt] == [2 * BATCH] * steps
    learnt = {label for labels in run.learnt for label in labels}
    assert learnt == {f"line {line}" for line, answer in enumerate(MIXED, start=1) if answer in "abcde"}
    assert run.learner.generator.different == BATCH * steps, "none that was generated is lost"
    assert sum(run.filtered) == run.learner.generator.asked - run.learner.generator.different


@pytest.mark.parametrize("in_4bit", [False, True])
def test_engines_get_what_a_policy_in_4_bits_computes_with_before_they_generate(trainer, in_4bit):
    run = trainer(["a", "b", "c"], ds__load_in_4bit=in_4bit, ds__lora__rank=4)
    asked: list[int] = []
    run.learner.models.policy.broadcast = lambda: asked.append(run.learner.generator.asked)
    assert run.fit() == 1
    assert asked == ([0] if in_4bit else [])


def test_a_run_whose_prompts_are_used_up_ends_with_its_last_full_step_and_says_so(trainer, capsys):
    run = trainer(MIXED)
    assert run.fit() == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("rl ends with step 1: the prompts are used up with 2 of the 3 groups of step 2: ")
    assert "--algo.dynamic_filtering_range" in said


def test_a_run_that_can_make_no_step_is_an_error(trainer):
    with pytest.raises(
        UserError, match="^no step could be made: the prompts are used up with 2 of the 3 groups of step 1"
    ):
        trainer(["a", "wrong", "b", "right"]).fit()
    with pytest.raises(
        UserError, match="^none of the last 4 prompts, a whole episode, gave a group to train on: 4 groups"
    ):
        trainer(["wrong", "wrong", "right", "right"], episodes=9).fit()


@pytest.mark.parametrize("limit", range(3, 23, 2))
def test_a_run_that_is_stopped_anywhere_learns_the_same_when_it_is_taken_up(limit, trainer):
    whole = trainer(MIXED, episodes=3)
    steps = whole.fit()
    stopped = trainer(MIXED, episodes=3, limit=limit)
    with pytest.raises(UserError, match="the reward server is gone"):
        stopped.fit()
    taken_up = trainer(MIXED, episodes=3)
    taken_up.step = stopped.saved["global_step"]
    taken_up.prompts.load_state_dict(stopped.saved["data_loader_state_dict"])
    # What was gathered for the step that was not made is generated again.
    assert taken_up.fit() == steps
    assert stopped.learnt + taken_up.learnt == whole.learnt
