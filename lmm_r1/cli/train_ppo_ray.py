"""`lmm-r1 train_ppo_ray`: one reinforcement-learning stage; it takes OpenRLHF's command lines."""

from collections.abc import Sequence

from lmm_r1.cli import run_command
from lmm_r1.cli.training import training
from lmm_r1.config import PPOConfig

CONFIG = PPOConfig
PROG = "lmm-r1 train_ppo_ray"
DESCRIPTION = "Train a multimodal model by rule-based reinforcement learning with Ray, DeepSpeed and vLLM."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    with training(PPOConfig, argv, prog=PROG, description=DESCRIPTION) as config:
        from lmm_r1.rl.run import train
        from lmm_r1.tools.planning.choices import planned

        train(config, plan=planned)


if __name__ == "__main__":
    run_command(main)
