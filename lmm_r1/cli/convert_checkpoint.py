"""Convert a checkpoint from its maker's own format: `lmm-r1 convert_checkpoint --input DIR --output DIR`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_new_folder, written_folder

PROG = "lmm-r1 convert_checkpoint"
DESCRIPTION = "Convert a checkpoint from its original format to the one that the other commands read."


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    input: Path
    """Folder with the original checkpoint: config, safetensors and tokenizer; it is only read."""
    output: Path
    """Folder to write; must not exist yet or be empty."""


CONFIG = ConvertConfig


def main(argv: list[str] | None = None) -> None:
    config = parse(ConvertConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        if not config.input.is_dir():
            raise UserError(f"--input {config.input}: no such folder; give a checkpoint on this machine")
        check_new_folder(config.output, flag="--output")
        convert(config)


def convert(config: ConvertConfig) -> None:
    """Write the converted checkpoint to a temporary folder next to `output`, then move it there."""
    from lmm_r1.lmm_kits.registry import converter_of

    convert_to = converter_of(config.input)
    with written_folder(config.output) as folder:
        sentences = convert_to(config.input, folder)
    for sentence in sentences:
        print(sentence)
    size = sum(file.stat().st_size for file in config.output.iterdir())
    print(f"{config.output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_command(main)
