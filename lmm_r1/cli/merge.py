"""Make a Hugging Face checkpoint of what was trained: `lmm-r1 merge --adapter DIR --output DIR`."""

from __future__ import annotations

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.evaluate import MergeConfig, check_merge

CONFIG = MergeConfig
PROG = "lmm-r1 merge"
DESCRIPTION = (
    "Write a checkpoint in Hugging Face format from a LoRA adapter, which is merged into its base model, or from a "
    "DeepSpeed ZeRO checkpoint. The files of a ZeRO checkpoint are pickles: anything in them but tensors and DeepSpeed's "
    "settings is refused, because it could run code."
)


def main(argv: list[str] | None = None) -> None:
    config = parse(MergeConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        check_merge(config)
        merge(config)


def merge(config: MergeConfig) -> None:
    """Write the folder and say what was merged, what difference that made, and what was written."""
    from lmm_r1 import cpu

    cpu.prepare_process()
    from lmm_r1.checkpoints.merge_job import write_merged

    for sentence in write_merged(config):
        print(sentence)
    files = sorted(config.output.iterdir())
    size = sum(file.stat().st_size for file in files)
    print(f"{config.output}: {size / 1e6:.1f} MB in {', '.join(file.name for file in files)}")
    if config.push_to_hub is not None:
        from lmm_r1.hub import upload

        print(upload(config.output, config.push_to_hub, private=config.private, flag="--push_to_hub"))


if __name__ == "__main__":
    run_command(main)
