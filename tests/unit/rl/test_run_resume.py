"""What an RL run's controller asks of the workers when it saves and goes on: both models, one step, the KL weight."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.conversations import message, row
from helpers.rl_steps import PlayedGroup
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.host.checkpoint_folder import begin, mark_complete, saving_name, write_latest
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.rl import loop
from lmm_r1.rl.loop import RLRun
from lmm_r1.rl.model_groups import Models
from lmm_r1.rl.run import workers_strategy

SETTINGS = table("rl/run_resume", "settings")


class NotingGroup(PlayedGroup):
    """Workers that note what they are asked, and know the states of the checkpoint that they have loaded."""

    def __init__(self, name: str, calls: list[tuple[str, str, dict]], states: dict[str, Any] | None = None) -> None:
        super().__init__(object())
        self.name, self.calls, self.states = name, calls, states or {}

    def start(self, method: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
        bound = inspect.signature(method).bind(self, *given, **named).arguments
        self.calls.append((self.name, method.__name__, {**bound, **bound.pop("named", {})}))
        return [self.states if method.__name__ == "get_checkpoint_states" else None]


@pytest.fixture
def calls() -> list[tuple[str, str, dict]]:
    return []


@pytest.fixture
def make_trainer(tmp_path: Path, calls: list, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RLRun]:
    monkeypatch.setattr(ray, "get", lambda references, timeout=None: references)

    def make(states: dict[str, Any] | None = None, **changes: object) -> RLRun:
        given = {name.replace("__", "."): value for name, value in changes.items()}
        paths = {"ckpt.path": str(tmp_path / "checkpoints"), "ckpt.output_dir": str(tmp_path / "run")}
        config = resolve(dotted.replace(PPOConfig(), SETTINGS | paths | given))
        prompt = row(message("user", "What is 1+1?"), answer="2")
        folder = RunFolder(path=tmp_path / "run", name="rl", kind="rl")
        folder.open("")
        return RLRun(
            config,
            models=Models(policy=NotingGroup("policy", calls, states), critic=NotingGroup("critic", calls)),
            engines=[],
            prompts=PromptStream([prompt], seed=0, episodes=10),
            eval_rows=[prompt],
            folder=folder,
        )

    return make


def write_checkpoint(folder: Path, tag: str, *, session: str = "one") -> None:
    begin(folder, tag)
    (folder / saving_name(tag)).mkdir()
    mark_complete(folder, tag, files={}, session=session)
    write_latest(folder, tag)


def at(trainer: RLRun, step: int) -> dict[str, Any]:
    """What is saved of the trainer when it has made so many steps."""
    trainer.step = step
    return trainer.states()


def asked(calls: list[tuple[str, str, dict]]) -> list[tuple[str, str, str]]:
    return [(name, method, given["tag"]) for name, method, given in calls if "tag" in given]


def both_save_then_both_settle(tag: str) -> list[tuple[str, str, str]]:
    methods = ("save_checkpoint", "settle_checkpoint")
    return [(name, method, tag) for method in methods for name in ("policy", "critic")]


def test_the_best_checkpoint_before_goes_once_both_models_are_saved(make_trainer, calls):
    trainer = make_trainer()
    trainer.checkpoints.save_if_best({"eval_test_pass1": 0.25}, 4, at(trainer, 4))
    assert asked(calls) == both_save_then_both_settle("best_global_step4")
    calls.clear()
    trainer.checkpoints.save_if_best({"eval_test_pass1": 0.25}, 6, at(trainer, 6))
    trainer.checkpoints.save_if_best({}, 8, at(trainer, 8))
    assert calls == [], "none is better"


@pytest.mark.parametrize(("made", "saved"), [([7, 7], True), ([7, 8], False)])
def test_a_step_that_ended_in_its_middle_is_saved_only_where_no_weight_was_changed(
    make_trainer, calls, made, saved, monkeypatch
):
    trainer = make_trainer()
    states = at(trainer, 5)
    trainer.updates_before = [7, 7]
    monkeypatch.setattr(loop, "updates_made", lambda models: made)
    trainer._save_before_stop(states)
    assert bool(asked(calls)) == saved
    assert trainer.progress().saved == (5 if saved else None)


def test_an_adaptive_kl_weight_goes_on_where_it_was(make_trainer, calls):
    trainer = make_trainer()
    # Twice the target, of which a fifth counts: 0.1 * (1 + 0.2 * 10 / 100).
    trainer.learner.kl_weight.update(1.0, samples=10)
    assert trainer.learner.kl_weight.value == pytest.approx(0.102)
    states = at(trainer, 1)
    resumed = make_trainer(states)
    assert resumed.learner.kl_weight.value == 0.1
    resumed._resume()
    assert resumed.step == resumed.saved_step == 1
    assert resumed.learner.kl_weight.value == pytest.approx(0.102)


def test_all_models_are_told_the_newest_step_that_both_have(make_trainer, tmp_path, caplog):
    folders = [tmp_path / "checkpoints" / name for name in ("_actor", "_critic")]
    for folder in folders:
        write_checkpoint(folder, "global_step1")
    write_checkpoint(folders[0], "global_step2")
    strategy = workers_strategy(make_trainer().config)
    assert (strategy.resume_tag, strategy.args.ckpt.load_enable) == ("global_step1", True)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "goes on from global_step1" in warning
    assert "_actor/global_step2" in warning


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(make_trainer, calls, tmp_path):
    trainer = make_trainer()
    evaluated = []

    def evaluate(step: int) -> dict[str, float]:
        evaluated.append(step)
        return {"eval_test_pass1": 0.5}

    trainer._evaluate = evaluate
    for step in (0, 1, 3):
        trainer.step = step
        trainer._catch_up_on_evaluation()
    assert evaluated == []
    trainer.step = 2
    trainer._catch_up_on_evaluation()
    assert evaluated == [2]
    assert asked(calls) == both_save_then_both_settle("best_global_step2")

    # It was logged, but not saved as the best.
    calls.clear()
    trainer = make_trainer()
    trainer._evaluate = evaluate
    trainer.folder.metrics(4, {"reward": 1.0})
    trainer.folder.metrics(4, {"eval_test_pass1": 0.75})
    trainer.step = 4
    trainer._catch_up_on_evaluation()
    assert evaluated == [2]
    assert asked(calls) == both_save_then_both_settle("best_global_step4")
    assert trainer.checkpoints.best.value == 0.75
