"""`lmm-r1 train_rm`: a reward model from pairs of responses, as `serve_rm` and RL's `--reward.model_name_or_path` take it."""

from collections.abc import Sequence

from lmm_r1.cli.arguments import parse, prepare_training, user_errors
from lmm_r1.config import RMConfig, resolve

PROG = "lmm-r1 train_rm"
DESCRIPTION = "Train a multimodal reward model on prompts with a chosen and a rejected response."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    config = parse(RMConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        config = resolve(config)
        prepare_training(config, model=config.model.model_name_or_path)
        from lmm_r1.trainer.rm import train

        train(config)


if __name__ == "__main__":
    main()
