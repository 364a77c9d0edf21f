"""`lmm-r1 init DIR`: a folder with rows, settings and a reward function that train, measure and chat as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from tyro.conf import Positional

from lmm_r1.cli import arguments, run_command, user_errors
from lmm_r1.data.files import write_row_folder
from lmm_r1.files.atomic import check_new_folder, unwritable, write_atomically
from lmm_r1.tasks import Split
from lmm_r1.tasks.digits import TASK

PROG = "lmm-r1 init"
DESCRIPTION = (
    "Write a project: rows with images, settings of each stage, a reward function, and a README with its commands."
)
TEMPLATES = "lmm_r1.cli.project"
FILES = ("README.md", "sft.yaml", "rl.yaml", "evaluate.yaml", "reward.py")
# Number of rows per split; training rows have worked answers.
ROWS: dict[Split, int] = {"train": 40, "test": 20}


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    folder: Positional[Path]
    """Folder to write; must not exist yet or be empty."""


CONFIG = InitConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder and say what to do with it."""
    config = arguments.parse(InitConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        run(config.folder)


def run(folder: Path) -> None:
    """Write the folder; raises UserError if it is not empty or cannot be written."""
    check_new_folder(folder.absolute(), flag="DIR")
    task = replace(TASK, min_digits=1, max_digits=2, max_image_digits=1)
    for split, count in ROWS.items():
        rows = task.generate(split=split, modality="mixed", rows=count, seed=0)
        records = (row.record(solution=split == "train") for row in rows)
        try:
            write_row_folder(records, output=folder / "rows" / split)
        except OSError as error:
            raise unwritable(f"DIR {folder}", error) from error
    templates = resources.files(TEMPLATES)
    for name in FILES:
        write_atomically(folder / name, text=(templates / name).read_text(encoding="utf-8"))
    print(
        f"{folder}: {', '.join(FILES)}, and in rows/ {' and '.join(f'{n} {split}' for split, n in ROWS.items())} rows"
    )
    enter = "" if folder.absolute().samefile(Path.cwd()) else f"cd {folder}, and "
    print(f"next: {enter}the commands of README.md")


if __name__ == "__main__":
    run_command(main)
