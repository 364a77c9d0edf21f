"""`lmm-r1 train_dpo`: direct preference optimization on pairs of responses to one prompt."""

from collections.abc import Sequence

from lmm_r1.cli import run_command
from lmm_r1.cli.training import training
from lmm_r1.config import DPOConfig

CONFIG = DPOConfig
PROG = "lmm-r1 train_dpo"
DESCRIPTION = "Train a multimodal model on prompts with a chosen and a rejected response: DPO, cDPO, IPO or SimPO."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    with training(DPOConfig, argv, prog=PROG, description=DESCRIPTION) as config:
        from lmm_r1.supervised.dpo import DPORun
        from lmm_r1.supervised.start import train

        train(DPORun, config)


if __name__ == "__main__":
    run_command(main)
