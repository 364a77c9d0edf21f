"""`lmm-r1 train_prm`: a process reward model from steps with labels, as `batch_inference --reward_model` takes it."""

from functools import partial

from lmm_r1.cli import run_command
from lmm_r1.cli.training import train_supervised
from lmm_r1.config import PRMConfig

CONFIG = PRMConfig
PROG = "lmm-r1 train_prm"
DESCRIPTION = "Train a multimodal process reward model on solutions with steps labelled right or wrong."
main = partial(train_supervised, "lmm_r1.supervised.prm:PRMRun", CONFIG, prog=PROG, description=DESCRIPTION)

if __name__ == "__main__":
    run_command(main)
