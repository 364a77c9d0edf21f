"""`lmm-r1 make_task digits --modality image --rows 1000 --output data/digits`: row files of a procedural task."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import Positional

from lmm_r1.cli import arguments
from lmm_r1.data.files import check_writable, write_row_folder
from lmm_r1.errors import UserError
from lmm_r1.tasks.task import Modality, Split, Task, get_task

PROG = "lmm-r1 make_task"
# Flags that replace a setting of the task, which has the default.
SETTINGS = ("min_digits", "max_digits", "max_image_digits", "image_share")


@dataclass(frozen=True, kw_only=True)
class MakeTaskConfig:
    task: Positional[str]
    """Name of the task: digits."""
    output: Path
    """Folder to write: rows.jsonl, and images/ where rows have images."""
    modality: Modality = "text"
    """Rows of text, rows with images, or both mixed."""
    split: Split = "train"
    """Which side of the task's fixed line between train and test the rows come from."""
    rows: int = 1000
    """How many rows."""
    seed: int = 0
    """The same seed gives the same files, byte for byte."""
    solutions: bool = False
    """Append a worked solution to each row as assistant turn: the files that train_sft reads for the cold start."""
    min_digits: int | None = None
    """Fewest digits in a row; None is the task's 3."""
    max_digits: int | None = None
    """Most digits in a row; None is the task's 3."""
    max_image_digits: int | None = None
    """Most digits in an image; None is max_digits. A cold start that first sees one digit an image reads sooner."""
    image_share: float | None = None
    """Share of the rows with images in modality mixed, evenly spread; None is the task's 0.5."""
    overwrite: bool = False
    """Replace a folder of rows that is already there."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write the row folder and say what is in it."""
    config = arguments.parse(
        MakeTaskConfig, argv, prog=PROG, description="Write rows of a procedural task, with images and known answers."
    )
    with arguments.user_errors(PROG):
        run(config)


def run(config: MakeTaskConfig) -> None:
    """Raises UserError if a value is wrong or the folder is taken."""
    if config.rows < 1:
        raise UserError(f"--rows {config.rows}: one row or more is needed")
    task = _with_settings(get_task(config.task), config)
    check_writable(config.output, overwrite=config.overwrite)
    rows = task.generate(split=config.split, modality=config.modality, rows=config.rows, seed=config.seed)
    records = (row.record(solution=config.solutions) for row in rows)
    count = write_row_folder(records, output=config.output, overwrite=config.overwrite)
    kind = "rows with solutions" if config.solutions else "rows"
    print(f"wrote {count} {kind} of {config.task} ({config.modality}, {config.split}) to {config.output}")


def _with_settings(task: Task, config: MakeTaskConfig) -> Task:
    asked = {name: getattr(config, name) for name in SETTINGS}
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        return replace(task, **given)
    except ValueError as error:
        flags = " ".join(f"--{name} {value}" for name, value in given.items())
        raise UserError(f"{flags}: {error}") from error


if __name__ == "__main__":
    main()
