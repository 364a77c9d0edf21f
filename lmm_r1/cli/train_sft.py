"""`lmm-r1 train_sft`: supervised fine-tuning on rows of messages, such as the cold start before RL."""

from collections.abc import Sequence

from lmm_r1.cli.arguments import parse, prepare_training, user_errors
from lmm_r1.config import SFTConfig, resolve

PROG = "lmm-r1 train_sft"
DESCRIPTION = "Fine-tune a multimodal model on rows of messages whose last message is the response."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    config = parse(SFTConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        config = resolve(config)
        prepare_training(config, model=config.model.model_name_or_path)
        from lmm_r1.trainer.sft import train

        train(config)


if __name__ == "__main__":
    main()
