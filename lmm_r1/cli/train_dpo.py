"""`lmm-r1 train_dpo`: direct preference optimization on pairs of responses to one prompt."""

from collections.abc import Sequence

from lmm_r1.cli.arguments import parse, prepare_training, user_errors
from lmm_r1.config import DPOConfig, resolve

PROG = "lmm-r1 train_dpo"
DESCRIPTION = "Train a multimodal model on prompts with a chosen and a rejected response: DPO, cDPO, IPO or SimPO."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    config = parse(DPOConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        config = resolve(config)
        prepare_training(config, model=config.model.model_name_or_path)
        from lmm_r1.trainer.dpo import train

        train(config)


if __name__ == "__main__":
    main()
