"""Rollouts that are made while the policy is updated: which prompts at which weight version, in an order written down.

The generator and the trainer wait for one another at moments that a script names, so that the order is always the same.
"""

import threading
from collections.abc import Callable, Sequence
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
from lmm_r1.rl.rollouts import KitSamplesGenerator, Rollout, group_settings

BATCH = 2
PATIENCE_S = 10.0


class Order:
    """Events in the order in which they have happened, and a way to wait for them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = threading.Condition()

    def note(self, event: str) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def await_(self, event: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.events, PATIENCE_S), (event, self.events)


class ScriptedGenerator(KitSamplesGenerator):
    """Gives each prompt two samples of the weights as they are when it begins, and waits before it ends a step's."""

    def __init__(self, *arguments: Any, run: "ScriptedTrainer") -> None:
        super().__init__(*arguments)
        self.run = run
        self.solved_in: int | None = None

    def generate(self, rows: Sequence[Row], settings: Any, **others: object) -> list[list[Sample]]:
        version, step = self.run.version, settings.moment.step
        names = " ".join(item.location for item in rows)
        self.run.order.note(f"generates {step}: {names} at {version}")
        if self.run.ends_after.get(step):
            self.run.order.await_(self.run.ends_after[step])
        self.run.order.note(f"generated {step}")
        if step == self.run.fails_at:
            raise UserError("the reward server is gone")
        scores = (0.0, 1.0) if self.solved_in is None else (float(step == self.solved_in),) * 2
        of = [[of_answer(item, score=score) for score in scores] for item in rows]
        return [[replace(sample, weight_version=version) for sample in group] for group in of]


class ScriptedTrainer(KillableRun):
    """Notes what it learns from in each step, and what it would save."""

    order: Order
    version = 0
    fails_at: int | None = None

    def train_step(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        if step == self.killed_in:
            raise Killed
        self.order.note(f"learns {step}")
        if self.updates_after.get(step):
            self.order.await_(self.updates_after[step])
        self.learnt.append(list(dict.fromkeys(sample.location for sample in rollout.samples)))
        self.order.note(f"sends {step}")
        self.learner.send_weights()
        return {}

    def record(self, step: int, metrics: dict[str, Any], rollout: Rollout) -> None:
        self.logged.append(metrics)
        self.versions.append([sample.weight_version for group in rollout.groups for sample in group])

    def sent(self) -> None:
        self.version += 1
        self.order.note(f"weights {self.version}")


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedTrainer]:
    """A function that makes a trainer on prompts a, b, c, ..."""
    monkeypatch.setattr(ray, "get", lambda refs, timeout=None: refs)
    play_steps(monkeypatch)

    def made(
        prompts: int,
        *,
        ends_after: dict[int, str] | None = None,
        updates_after: dict[int, str] | None = None,
        episodes: int = 1,
        **flags: object,
    ) -> ScriptedTrainer:
        own = {"train__num_episodes": episodes, "train__async_enable": True, "ckpt__output_dir": str(tmp_path)}
        config = small_run(prompts=BATCH, **{**own, **flags})
        rows = [replace(row(message("user", "?")), location=chr(ord("a") + place)) for place in range(prompts)]
        trainer = without_workers(ScriptedTrainer, config, rows, folder=tmp_path)
        trainer.order, trainer.learnt, trainer.logged, trainer.saved, trainer.versions = Order(), [], [], [], []
        trainer.ends_after, trainer.updates_after = ends_after or {}, updates_after or {}
        trainer.learner.generator = ScriptedGenerator(config, [], group_settings(config), run=trainer)
        trainer.recorder = SimpleNamespace(step=trainer.record)
        trainer.learner.models.policy.broadcast = trainer.sent
        return trainer

    return made


def order_of(prompts: int, *, episodes: int = 1) -> list[list[str]]:
    """The prompts of each step, as a run takes them that makes one rollout after the other."""
    stream = PromptStream([chr(ord("a") + place) for place in range(prompts)], seed=1, episodes=episodes)
    steps = []
    while stream.has(BATCH):
        steps.append(stream.take(BATCH))
    return steps


def test_the_next_rollout_is_made_while_the_policy_learns_and_its_weights_are_one_update_old(scripted):
    # Each update ends only when the next rollout is generated: that would wait for ever if it were not begun.
    updates_after = {1: "generated 2", 2: "generated 3"}
    run = scripted(6, updates_after=updates_after)
    assert run.fit() == 3
    (a, b), (c, d), (e, f) = order_of(6)
    assert run.learnt == [[a, b], [c, d], [e, f]]
    assert [event for event in run.order.events if event.startswith("generates")] == [
        f"generates 1: {a} {b} at 0",
        f"generates 2: {c} {d} at 0",
        f"generates 3: {e} {f} at 1",
    ]
    assert [status["async/staleness_mean"] for status in run.logged] == [0, 1, 1]
    assert [status["async/staleness_max"] for status in run.logged] == [0, 1, 1]
    assert [status["async/stale_samples"] for status in run.logged] == [0, 1, 1]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sample_is_older_than_the_queue_allows_and_so_far_ahead_rollouts_are_made(scripted, size):
    steps = 7
    # Every update waits until as many rollouts are made ahead as may be.
    updates_after = {step: f"generated {min(step + size, steps)}" for step in range(1, steps + 1)}
    run = scripted(BATCH * steps, updates_after=updates_after, train__async_queue_size=size)
    assert run.fit() == steps
    ages = [step - version for step, versions in enumerate(run.versions) for version in versions]
    assert max(ages) == size
    assert [status["async/staleness_max"] for status in run.logged] == [min(step, size) for step in range(steps)]
    assert run.learnt == order_of(BATCH * steps)
    # One more would have been begun before the update that it waits for.
    for step in range(1, steps - size):
        events = run.order.events
        begun = next(place for place, event in enumerate(events) if event.startswith(f"generates {step + size + 1}:"))
        assert events.index(f"weights {step}") < begun


def test_weights_are_replaced_between_rollouts_where_none_goes_on_across_an_update(scripted):
    # The second rollout goes on until the first update's weights are to be sent, which wait for it.
    begun = "generates 2: {} {} at 0".format(*order_of(6)[1])
    run = scripted(6, updates_after={1: begun}, ends_after={2: "sends 1"})
    assert run.fit() == 3
    events = run.order.events
    assert events.index("sends 1") < events.index("generated 2") < events.index("weights 1")
    generated = [events.index(event) for event in events if event.startswith("generates")]
    for place in generated:
        step = events[place].split()[1].rstrip(":")
        between = events[place : events.index(f"generated {step}")]
        assert not [event for event in between if event.startswith("weights")]


def test_partial_rollouts_are_held_up_while_weights_are_replaced_and_go_on_with_them(scripted, monkeypatch):
    begun = "generates 2: {} {} at 0".format(*order_of(6)[1])
    run = scripted(
        6, updates_after={1: begun}, ends_after={2: "weights 1", 3: "weights 2"}, train__partial_rollout_enable=True
    )
    run.learner.engines = [NotedEngine(run.order.note)]
    assert run.fit() == 3
    events = run.order.events
    assert [event for event in events if "generation" in event or event.startswith("weights")] == [
        *("pause_generation", "weights 1", "resume_generation"),
        *("pause_generation", "weights 2", "resume_generation"),
        *("pause_generation", "weights 3", "resume_generation"),
    ]
    assert events.index(begun) < events.index("weights 1") < events.index("generated 2")


@pytest.mark.parametrize("killed_in", range(1, 7))
@pytest.mark.parametrize("size", [1, 3])
def test_a_killed_run_that_is_taken_up_loses_and_repeats_no_prompt(scripted, size, killed_in):
    flags = {"episodes": 2, "train__async_queue_size": size}
    expected = order_of(7, episodes=2)
    assert len(expected) == 6
    killed = scripted(7, **flags)
    killed.killed_in = killed_in
    with pytest.raises(Killed):
        killed.fit()
    again = scripted(7, **flags)
    if killed.saved:
        again.step = killed.saved[-1]["global_step"]
        again.prompts.load_state_dict(killed.saved[-1]["data_loader_state_dict"])
    assert again.fit() == len(expected)
    assert killed.learnt + again.learnt == expected
