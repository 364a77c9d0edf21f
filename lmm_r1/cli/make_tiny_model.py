"""Make a small, randomly initialised checkpoint: `lmm-r1 make_tiny_model --arch KIT --output DIR`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.data.messages import Row, TextPart, demonstration
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_new_folder, written_folder

PROG = "lmm-r1 make_tiny_model"
CORPUS_ROWS = 2000
TASKS = ("digits",)
BYTES = 256


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    arch: str
    """Kit of the architecture to build; an unknown name lists the known ones."""
    output: Path
    """Folder to write; must not exist yet or be empty."""
    hidden_size: int = 128
    """Width of the language model (and of the vision tower); a multiple of 64."""
    layers: int = 2
    """Layers of the language model."""
    tie_embeddings: bool = False
    """Share the input embedding with the output layer."""
    seed: int = 0
    """Seed of the random weights."""
    tasks: tuple[str, ...] = TASKS
    """Tasks whose training rows, with solutions, the tokenizer is trained on."""
    rows: tuple[str, ...] = ()
    """Row files that the tokenizer is trained on instead of tasks, for example the episodes of a cold start."""
    tokens: int | None = None
    """Maximum number of ordinary tokens, including 256 bytes; None is about 400. More tokens make long texts shorter."""


CONFIG = TinyModelConfig


def main(argv: list[str] | None = None) -> None:
    config = parse(TinyModelConfig, argv, prog=PROG, description="Build a small random checkpoint, offline.")
    with user_errors(PROG):
        if config.hidden_size % 64 or config.hidden_size <= 0 or config.layers <= 0:
            raise UserError(
                f"--hidden_size {config.hidden_size} must be a positive multiple of 64, --layers {config.layers} positive"
            )
        if config.rows and config.tasks != TASKS:
            raise UserError(f"--tasks {' '.join(config.tasks)} with --rows {' '.join(config.rows)}: leave one out")
        if config.tokens is not None and config.tokens < BYTES:
            raise UserError(f"--tokens {config.tokens}: a tokenizer has at least {BYTES}, one for each byte")
        check_new_folder(config.output, flag="--output")
        build(config)


def build(config: TinyModelConfig) -> None:
    """Build the checkpoint in a temporary folder next to `output`, then move it there."""
    from lmm_r1 import cpu

    cpu.prepare_process()
    from lmm_r1.lmm_kits import TinyModelSpec
    from lmm_r1.lmm_kits.registry import get_kit

    kit = get_kit(config.arch)
    spec = TinyModelSpec(
        hidden_size=config.hidden_size,
        layers=config.layers,
        seed=config.seed,
        tie_embeddings=config.tie_embeddings,
        tokens=config.tokens,
    )
    with written_folder(config.output) as folder:
        kit.build_tiny(
            spec, _corpus(_rows_of_files(config.rows) if config.rows else _rows_of_tasks(config.tasks)), folder
        )
    size = sum(file.stat().st_size for file in config.output.iterdir())
    print(f"{config.output}: {config.arch}, {size / 1e6:.1f} MB")


def _corpus(rows: Iterable[Row]) -> Iterator[str]:
    """Yield what the tokenizer is trained on: a chat's frame, and the texts of rows."""
    for row in rows:
        yield "system\nYou are a helpful assistant."
        for message in row.messages:
            yield f"{message.role}\n"
            yield from (part.text for part in message.parts if isinstance(part, TextPart))


def _rows_of_tasks(tasks: Sequence[str]) -> Iterator[Row]:
    """Yield training rows with solutions."""
    from lmm_r1.data.row_parser import parse_row
    from lmm_r1.tools.tasks import get_task

    for name in tasks:
        for made in get_task(name).generate(split="train", modality="text", rows=CORPUS_ROWS, seed=0):
            record = made.record(solution=True)
            yield parse_row(record, location=f"task {name}", base_dir=Path(), answer_required=False)


def _rows_of_files(paths: Sequence[str]) -> Iterator[Row]:
    """Yield the first rows of each file, their responses included."""
    from lmm_r1.data.files import read_row_file

    for path in paths:
        yield from map(demonstration, read_row_file(path, max_rows=CORPUS_ROWS, answer_required=False).rows.values())


if __name__ == "__main__":
    run_command(main)
