"""`lmm-r1 train_dpo`: direct preference optimization on pairs of responses to one prompt."""

from functools import partial

from lmm_r1.cli import run_command
from lmm_r1.cli.training import train_supervised
from lmm_r1.config import DPOConfig

CONFIG = DPOConfig
PROG = "lmm-r1 train_dpo"
DESCRIPTION = "Train a multimodal model on prompts with a chosen and a rejected response: DPO, cDPO, IPO or SimPO."
main = partial(train_supervised, "lmm_r1.supervised.pairs:DPORun", CONFIG, prog=PROG, description=DESCRIPTION)

if __name__ == "__main__":
    run_command(main)
