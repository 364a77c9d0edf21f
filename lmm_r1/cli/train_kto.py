"""`lmm-r1 train_kto`: Kahneman-Tversky optimization on single responses that are desirable or not."""

from collections.abc import Sequence

from lmm_r1.cli.arguments import parse, prepare_training, user_errors
from lmm_r1.config import KTOConfig, resolve

PROG = "lmm-r1 train_kto"
DESCRIPTION = "Train a multimodal model on prompts with one response each, which is desirable or undesirable."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    config = parse(KTOConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        config = resolve(config)
        prepare_training(config, model=config.model.model_name_or_path)
        from lmm_r1.trainer.kto import train

        train(config)


if __name__ == "__main__":
    main()
