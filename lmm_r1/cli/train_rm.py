"""`lmm-r1 train_rm`: a reward model from pairs of responses, as `serve_rm` and RL's `--reward.model_name_or_path` take it."""

from collections.abc import Sequence

from lmm_r1.cli import run_command
from lmm_r1.cli.training import training
from lmm_r1.config import RMConfig

CONFIG = RMConfig
PROG = "lmm-r1 train_rm"
DESCRIPTION = "Train a multimodal reward model on prompts with a chosen and a rejected response."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    with training(RMConfig, argv, prog=PROG, description=DESCRIPTION) as config:
        from lmm_r1.supervised.rm import RMRun
        from lmm_r1.supervised.start import train

        train(RMRun, config)


if __name__ == "__main__":
    run_command(main)
