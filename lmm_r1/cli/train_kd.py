"""`lmm-r1 train_kd`: distillation of a teacher's distributions over tokens into a student."""

from functools import partial

from lmm_r1.cli import run_command
from lmm_r1.cli.training import train_supervised
from lmm_r1.config import KDConfig

CONFIG = KDConfig
PROG = "lmm-r1 train_kd"
DESCRIPTION = "Train a multimodal model to match the token distributions of a teacher with the same tokenizer."
main = partial(train_supervised, "lmm_r1.supervised.sft:KDRun", CONFIG, prog=PROG, description=DESCRIPTION)

if __name__ == "__main__":
    run_command(main)
