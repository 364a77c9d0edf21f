"""`lmm-r1 train_kd`: distillation of a teacher's distributions over tokens into a student."""

from collections.abc import Sequence

from lmm_r1.cli import run_command
from lmm_r1.cli.training import train_supervised
from lmm_r1.config import KDConfig

CONFIG = KDConfig
PROG = "lmm-r1 train_kd"
DESCRIPTION = "Train a multimodal model to predict tokens like a teacher with the same tokenizer."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    train_supervised("lmm_r1.supervised.kd:KDRun", KDConfig, argv, prog=PROG, description=DESCRIPTION)


if __name__ == "__main__":
    run_command(main)
