"""`lmm-r1 train_prm`: a process reward model from steps with labels, as `batch_inference --reward_model` takes it."""

from collections.abc import Sequence

from lmm_r1.cli.arguments import parse, prepare_training, user_errors
from lmm_r1.config import PRMConfig, resolve

PROG = "lmm-r1 train_prm"
DESCRIPTION = "Train a multimodal process reward model on solutions whose steps are labelled right or wrong."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    config = parse(PRMConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        config = resolve(config)
        prepare_training(config, model=config.model.model_name_or_path)
        from lmm_r1.trainer.prm import train

        train(config)


if __name__ == "__main__":
    main()
