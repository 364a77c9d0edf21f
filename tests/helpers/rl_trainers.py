"""Trainers of RL whose models and engines are not there."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Row
from lmm_r1.host.strategy import make_strategy
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.rl.loop import KitPPOTrainer
from lmm_r1.rl.run import prompt_stream

Trainer = TypeVar("Trainer", bound=KitPPOTrainer)
# Of the policy's workers.
ANSWERS = {"shares_prefix": True, "get_checkpoint_states": {}, "updates_made": 0, "broadcast_to_vllm": None}


def without_workers(kind: type[Trainer], config: PPOConfig, rows: Sequence[Row], *, folder: Path) -> Trainer:
    """A trainer of prompts, whose policy's workers answer what is asked of them at once."""
    return kind(
        config,
        make_strategy(config),
        actor_group=SimpleNamespace(async_run_method=lambda method_name: [ANSWERS[method_name]]),
        critic_group=None,
        reward_group=None,
        reference_group=None,
        engines=[],
        tokenizer=None,
        prompts=prompt_stream(dotted.replace(config, {"train.seed": 1}), rows),
        eval_rows=[],
        folder=RunFolder(path=folder, name="rl", kind="rl"),
    )
