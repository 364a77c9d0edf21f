"""The policy's worker keeps a moving average of the weights: when it moves, where it is saved, what it goes on from."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.rl import workers
from lmm_r1.rl.workers import KitPolicyActor
from lmm_r1.train.update import Step


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


@pytest.mark.parametrize(("applied", "updates"), [(True, 2), (False, 0)])
def test_an_average_moves_with_the_updates_that_were_made(applied, updates, monkeypatch):
    """Not with each pass of an update, nor with one that fp16's overflow leaves out."""
    step = Step(loss=0.0, means={}, tokens=1, computed=1, rate=0.5, grad_norm=1.0)
    monkeypatch.setattr(workers, "update", lambda *given, **named: step)
    worker = object.__new__(KitPolicyActor)
    worker.average, worker.loss, worker.empty_cache = NotedAverage(), None, lambda: None
    worker.strategy = SimpleNamespace(config=PPOConfig())
    worker.model = SimpleNamespace(was_step_applied=lambda: applied, train=lambda: None)
    worker.fit([["a pass", "another"], ["a pass", "another"]], kl_weight=0.0)
    assert worker.average.updates == updates


@pytest.mark.parametrize("resumed", [False, True])
def test_a_workers_average_is_updated_with_the_weights_and_saved_beside_the_model(resumed, monkeypatch):
    """With train.enable_ema it begins where the weights are, with train.ema_beta, or goes on from its checkpoint."""
    monkeypatch.setattr(workers, "MovingAverage", NotedAverage)
    worker = object.__new__(KitPolicyActor)
    worker.model = SimpleNamespace()
    worker.strategy = SimpleNamespace(
        config=dotted.replace(PPOConfig(), {"ckpt.path": "/checkpoints"}), loaded_tag="global_step4", write_beside=None
    )
    worker.states = {"global_step": 4} if resumed else {}
    worker._begin_average(beta=0.9)
    average = worker.average
    assert average.beta == 0.9
    assert average.loaded == ([Path("/checkpoints/_actor/global_step4")] if resumed else [])
    assert worker.strategy.write_beside(Path("saving")) == Path("saving/own")
