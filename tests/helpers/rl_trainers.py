"""Runs of RL whose models and engines are not there."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Row
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.rl import loop
from lmm_r1.rl.loop import RLRun
from lmm_r1.rl.model_groups import Models
from lmm_r1.rl.rollouts import Rollout
from lmm_r1.rl.run import prompt_stream

Run = TypeVar("Run", bound=RLRun)


class AnsweringPolicy:
    """The policy's workers, which answer at once."""

    duplicate_actors = 1
    answers = {"shares_prefix": True, "get_checkpoint_states": {}, "updates_made": 0}

    def __init__(self) -> None:
        self.broadcast: Callable[[], None] = lambda: None

    def async_run_method(self, method_name: str) -> list[Any]:
        return [self.broadcast() if method_name == "broadcast_to_vllm" else self.answers[method_name]]


def without_workers(kind: type[Run], config: PPOConfig, rows: Sequence[Row], *, folder: Path) -> Run:
    """A run of prompts, whose policy's workers answer at once."""
    run = kind(
        config,
        models=Models(policy=AnsweringPolicy()),
        engines=[],
        prompts=prompt_stream(dotted.replace(config, {"train.seed": 1}), rows),
        eval_rows=[],
        folder=RunFolder(path=folder, name="rl", kind="rl"),
    )
    run.learner.run = run
    return run


def play_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each run's `train_step(rollout, step=...)` take the place of training."""

    def train_on(learner: Any, rollout: Rollout, *, step: int) -> dict[str, float]:
        return learner.run.train_step(rollout, step=step)

    monkeypatch.setattr(loop, "train_on", train_on)
