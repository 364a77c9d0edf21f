"""`lmm-r1 train_sft`: supervised fine-tuning on rows of messages, such as the cold start before RL."""

from collections.abc import Sequence

from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.config import SFTConfig, resolve

PROG = "lmm-r1 train_sft"
DESCRIPTION = "Fine-tune a multimodal model on rows of messages whose last message is the response."


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the flags say."""
    config = parse(SFTConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        config = resolve(config)
        from lmm_r1 import cpu
        from lmm_r1.lmm_kits.registry import kit_name_of
        from lmm_r1.records.trackers import check_trackers

        check_trackers(config.logger)
        # Asked before the training stack is loaded, which takes longer than telling.
        assert config.model.model_name_or_path is not None, "resolve requires it"
        kit_name_of(config.model.model_name_or_path, trust_remote_code=config.train.trust_remote_code)

        cpu.prepare_process()
        from lmm_r1.trainer.sft import train

        train(config)


if __name__ == "__main__":
    main()
