"""`lmm-r1 train_sft`: supervised fine-tuning on rows of messages, such as the cold start before RL."""

from functools import partial

from lmm_r1.cli import run_command
from lmm_r1.cli.training import train_supervised
from lmm_r1.config import SFTConfig

CONFIG = SFTConfig
PROG = "lmm-r1 train_sft"
DESCRIPTION = "Fine-tune a multimodal model on rows of messages whose last message is the response."
main = partial(train_supervised, "lmm_r1.supervised.sft:SFTRun", CONFIG, prog=PROG, description=DESCRIPTION)

if __name__ == "__main__":
    run_command(main)
