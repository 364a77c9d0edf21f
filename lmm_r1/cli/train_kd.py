"""`lmm-r1 train_kd`: distillation of a teacher's distributions over tokens into a student."""

from collections.abc import Sequence

from lmm_r1.cli import run_command
from lmm_r1.cli.training import training
from lmm_r1.config import KDConfig

CONFIG = KDConfig
PROG = "lmm-r1 train_kd"
DESCRIPTION = "Train a multimodal model to predict tokens like a teacher with the same tokenizer."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    with training(KDConfig, argv, prog=PROG, description=DESCRIPTION) as config:
        from lmm_r1.supervised.kd import KDRun
        from lmm_r1.supervised.start import train

        train(KDRun, config)


if __name__ == "__main__":
    run_command(main)
