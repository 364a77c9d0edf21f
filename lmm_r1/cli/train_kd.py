"""`lmm-r1 train_kd`: distillation of a teacher's distributions over tokens into a student."""

from collections.abc import Sequence

from lmm_r1.cli.arguments import parse, prepare_training, user_errors
from lmm_r1.config import KDConfig, resolve

PROG = "lmm-r1 train_kd"
DESCRIPTION = "Train a multimodal model to predict tokens as a teacher does, which has the same tokenizer."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    config = parse(KDConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        config = resolve(config)
        prepare_training(config, model=config.model.model_name_or_path)
        from lmm_r1.trainer.kd import train

        train(config)


if __name__ == "__main__":
    main()
