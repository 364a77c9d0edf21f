"""Make a vision-language checkpoint of released parts: `lmm-r1 make_vlm --language DIR --vision DIR --side PIXELS ...`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_new_folder, written_folder

PROG = "lmm-r1 make_vlm"
DESCRIPTION = "Write a vision-language checkpoint: a released language model, a vision tower, and a new projector."


@dataclass(frozen=True, kw_only=True)
class MakeVlmConfig:
    language: str
    """Checkpoint of an instruct model; it keeps its weights, its token ids and its chat template."""
    vision: str
    """Vision tower: a checkpoint of DINOv2 or SigLIP, an ONNX file of DINOv2, or `random` for a small new one."""
    arch: str
    """Kit of the architecture; a wrong name lists the known ones."""
    side: int
    """Side of the tower's square images, in pixels; position embeddings are resized to it."""
    tiles: int = 1
    """Most tiles of an image; kits that cut a grid count them along its longer side."""
    output: Path
    """Folder to write; must not exist yet or be empty."""
    seed: int = 0
    """Seed of the new weights."""


CONFIG = MakeVlmConfig


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(MakeVlmConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        if config.side <= 0 or config.tiles <= 0:
            raise UserError(f"--side {config.side} and --tiles {config.tiles} must be positive")
        check_new_folder(config.output, flag="--output")
        make(**vars(config))


def make(*, language: str, arch: str, output: Path, **settings: Any) -> None:
    """Write the checkpoint and print its parts; raises UserError for parts that do not fit together."""
    from lmm_r1 import cpu

    cpu.prepare_process()
    from lmm_r1.generation.request import check_turn_end
    from lmm_r1.lmm_kits import Checkpoint, get_kit
    from lmm_r1.lmm_kits.assembly import assemble
    from lmm_r1.lmm_kits.checkpoint import check_embeddings

    with written_folder(output) as folder:
        parts = assemble(get_kit(arch), Checkpoint(language), folder=folder, **settings)
        made = Checkpoint(str(folder))
        check_turn_end(made.kit, made.processor, path=str(folder), model=str(output))
        check_embeddings(made)
    total = sum(count for count, _ in parts.values())
    print(f"{output}: {arch}, {total:,} parameters; turns end with {made.tokenizer.eos_token}")
    for part, (count, origin) in parts.items():
        print(f"  {part:<15}{count:>15,}  {origin}")


if __name__ == "__main__":
    run_command(main)
