"""The training commands: `lmm_r1.cli` loads this file as `lmm_r1.cli.train_sft` and under the name of each other trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from lmm_r1.cli import run_command
from lmm_r1.cli.training import training
from lmm_r1.config import DPOConfig, KDConfig, KTOConfig, PPOConfig, PRMConfig, RMConfig, SFTConfig


@dataclass(frozen=True)
class Trainer:
    """A command that trains, by its flags and by what it starts."""

    config: type[Any]
    description: str
    run: str | None = None
    """The class of the supervised loop, as `module:name`, imported after the flags are checked; None for RL."""


TRAINERS = {
    "train_ppo_ray": Trainer(
        PPOConfig, "Train a multimodal model by rule-based reinforcement learning with Ray, DeepSpeed and vLLM."
    ),
    "train_sft": Trainer(
        SFTConfig,
        "Fine-tune a multimodal model on rows of messages whose last message is the response.",
        "lmm_r1.supervised.sft:SFTRun",
    ),
    "train_dpo": Trainer(
        DPOConfig,
        "Train a multimodal model on prompts with a chosen and a rejected response: DPO, cDPO, IPO or SimPO.",
        "lmm_r1.supervised.dpo:DPORun",
    ),
    "train_kto": Trainer(
        KTOConfig,
        "Train a multimodal model on prompts with one response each, which is desirable or undesirable.",
        "lmm_r1.supervised.kto:KTORun",
    ),
    "train_prm": Trainer(
        PRMConfig,
        "Train a multimodal process reward model on solutions with steps labelled right or wrong.",
        "lmm_r1.supervised.prm:PRMRun",
    ),
    "train_rm": Trainer(
        RMConfig,
        "Train a multimodal reward model on prompts with a chosen and a rejected response.",
        "lmm_r1.supervised.rm:RMRun",
    ),
    "train_kd": Trainer(
        KDConfig,
        "Train a multimodal model to predict tokens like a teacher with the same tokenizer.",
        "lmm_r1.supervised.kd:KDRun",
    ),
}

# `python -m` names this file `__main__`; its specification has the command's name in both cases.
assert __spec__ is not None, "loaded by the finder of lmm_r1.cli"
COMMAND = __spec__.name.rpartition(".")[2]
TRAINER = TRAINERS[COMMAND]
CONFIG = TRAINER.config
PROG = f"lmm-r1 {COMMAND}"


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    with training(CONFIG, argv, prog=PROG, description=TRAINER.description) as config:
        if TRAINER.run is None:
            from lmm_r1.rl.run import train as train_rl

            train_rl(config)
            return
        from lmm_r1.supervised.start import train

        train(resolve_name(TRAINER.run), config)


if __name__ == "__main__":
    run_command(main)
