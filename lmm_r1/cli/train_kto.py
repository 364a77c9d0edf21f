"""`lmm-r1 train_kto`: Kahneman-Tversky optimization on single responses that are desirable or not."""

from functools import partial

from lmm_r1.cli import run_command
from lmm_r1.cli.training import train_supervised
from lmm_r1.config import KTOConfig

CONFIG = KTOConfig
PROG = "lmm-r1 train_kto"
DESCRIPTION = "Train a multimodal model on prompts with one response each, which is desirable or undesirable."
main = partial(train_supervised, "lmm_r1.supervised.kto:KTORun", CONFIG, prog=PROG, description=DESCRIPTION)

if __name__ == "__main__":
    run_command(main)
