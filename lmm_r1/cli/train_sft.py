"""`lmm-r1 train_sft`: supervised fine-tuning on rows of messages, such as the cold start before RL."""

from collections.abc import Sequence

from lmm_r1.cli import run_command
from lmm_r1.cli.training import train_supervised
from lmm_r1.config import SFTConfig

CONFIG = SFTConfig
PROG = "lmm-r1 train_sft"
DESCRIPTION = "Fine-tune a multimodal model on rows of messages whose last message is the response."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    train_supervised("lmm_r1.supervised.sft:SFTRun", SFTConfig, argv, prog=PROG, description=DESCRIPTION)


if __name__ == "__main__":
    run_command(main)
