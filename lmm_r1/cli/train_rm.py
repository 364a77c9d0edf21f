"""`lmm-r1 train_rm`: a reward model from pairs of responses, as `serve_rm` and RL's `--reward.model_name_or_path` take it."""

from functools import partial

from lmm_r1.cli import run_command
from lmm_r1.cli.training import train_supervised
from lmm_r1.config import RMConfig

CONFIG = RMConfig
PROG = "lmm-r1 train_rm"
DESCRIPTION = "Train a multimodal reward model on prompts with a chosen and a rejected response."
main = partial(train_supervised, "lmm_r1.supervised.pairs:RMRun", CONFIG, prog=PROG, description=DESCRIPTION)

if __name__ == "__main__":
    run_command(main)
