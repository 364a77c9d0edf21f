"""The policy's worker keeps a moving average of the weights: when it moves, where it is saved, what it goes on from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.rl import workers
from lmm_r1.rl.losses import LossSettings
from lmm_r1.rl.workers import KitActorPPOTrainer, KitPolicyActor


class NotedAverage:
    """Notes what is asked of it."""

    def __init__(self, engine: object = None, *, beta: float = 0.0) -> None:
        self.beta, self.updates = beta, 0
        self.loaded: list[Path] = []

    def update(self) -> None:
        self.updates += 1

    def load(self, folder: Path) -> None:
        self.loaded.append(folder)

    def save(self, folder: Path) -> Path:
        return folder / "own"


@pytest.mark.parametrize(("applied", "updates"), [(True, 1), (False, 0)])
def test_an_average_moves_with_the_updates_that_were_made(applied, updates, monkeypatch):
    """Not with each pass of an update, nor with one that fp16's overflow leaves out."""
    status: dict[str, Any] = {"metrics": {}, "weights": {}, "num_action_tokens": 1.0}
    monkeypatch.setattr(ActorPPOTrainer, "training_step", lambda *given: status)
    trainer = object.__new__(KitActorPPOTrainer)
    trainer.average, trainer.actor_scheduler = NotedAverage(), SimpleNamespace(get_last_lr=lambda: [0.5])
    trainer.strategy = SimpleNamespace(config=PPOConfig(), ds_device_mesh={"dp": SimpleNamespace(size=lambda: 1)})
    trainer.actor = SimpleNamespace(model=SimpleNamespace(was_step_applied=lambda: applied))
    trainer.loss_settings = LossSettings()
    trainer.replay_buffer = SimpleNamespace(
        announce_pass=lambda engine, step: None, dynamic_optimizer_step=[0, 1], dynamic_batch_num_tokens=[1, 1]
    )
    for step in (0, 1):
        trainer.training_step(None, 0.0, step, {})
    assert trainer.average.updates == updates


@pytest.mark.parametrize("resumed", [False, True])
def test_a_workers_average_is_updated_with_the_weights_and_saved_beside_the_model(resumed, monkeypatch):
    """With train.enable_ema it begins where the weights are, with train.ema_beta, or goes on from its checkpoint."""
    monkeypatch.setattr(workers, "MovingAverage", NotedAverage)
    worker = object.__new__(KitPolicyActor)
    worker.actor, worker.trainer = SimpleNamespace(model=None), SimpleNamespace(average=None)
    worker.strategy = SimpleNamespace(
        config=dotted.replace(PPOConfig(), {"ckpt.path": "/checkpoints"}), loaded_tag="global_step4", write_beside=None
    )
    worker.checkpoint_states = {"global_step": 4} if resumed else {}
    worker._begin_average(beta=0.9)
    average = worker.trainer.average
    assert average.beta == 0.9
    assert average.loaded == ([Path("/checkpoints/_actor/global_step4")] if resumed else [])
    assert worker.strategy.write_beside(Path("saving")) == Path("saving/own")
