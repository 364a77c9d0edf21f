"""`lmm-r1 init DIR`: a folder with rows, settings and a reward function that train, measure and chat as they are.

With `--model` and `--rows`, the settings are those of RL of that model on those rows, on this machine or another one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from PIL import Image, ImageDraw

from lmm_r1.cli import arguments, run_command, user_errors
from lmm_r1.cli.plan import MachineFlags
from lmm_r1.config.declared import Positional
from lmm_r1.data.files import write_row_folder
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_new_folder, unwritable, write_atomically

PROG = "lmm-r1 init"
DESCRIPTION = (
    "Write a project: rows with images, settings of each stage, a reward function, and a README with its commands. With "
    "--model and --rows, write the settings to train that model on those rows."
)
TEMPLATES = "lmm_r1.cli.project"
FILES = ("README.md", "sft.yaml", "rl.yaml", "evaluate.yaml", "reward.py")
# Number of rows per split; training rows have worked answers.
ROWS = {"train": 40, "test": 100}
COLOURS = {"red": (225, 30, 30), "green": (20, 165, 60), "blue": (40, 70, 230), "yellow": (240, 215, 20)}
SIDE = 56


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    folder: Positional[Path]
    """Folder to write; must not exist yet or be empty."""
    model: str | None = None
    """Your model, a folder or a name on the hub."""
    rows: str | None = None
    """Your rows with images: a file, folder or dataset."""
    num_gpus: int | None = None
    """GPUs of the machine that will train. None is what this machine has."""
    gpu_memory_gib: float | None = None
    """Memory of each of its GPUs in GiB. None is this machine's."""


CONFIG = InitConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder and say what to do with it."""
    config = arguments.parse(InitConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        if config.model is None and config.rows is None:
            run(config.folder)
            return
        if config.model is None or config.rows is None:
            raise UserError("--model and --rows belong together; give both, or none for a project with toy rows")
        from lmm_r1.cli.own_rows import write_project

        write_project(
            config.folder,
            model=config.model,
            rows=config.rows,
            machine=MachineFlags(num_gpus=config.num_gpus, gpu_memory_gib=config.gpu_memory_gib),
        )


def run(folder: Path) -> None:
    """Write the folder; raises UserError if it is not empty or cannot be written."""
    check_new_folder(folder.absolute(), flag="DIR")
    for split, count in ROWS.items():
        draw = random.Random(split)
        records = (_row(draw, number=number, is_solved=split == "train") for number in range(count))
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


def _row(draw: random.Random, *, number: int, is_solved: bool) -> dict[str, object]:
    """Return a question about the colour of a shape, of which every second one is asked with a picture."""
    colour, other = draw.sample(list(COLOURS), 2)
    shape, another = draw.sample(("circle", "square"), 2)
    question = f"What colour is the {shape}?"
    content: list[dict[str, object]]
    if number % 2:
        content = [{"type": "image", "image": _picture(draw, shape, colour)}, {"type": "text", "text": question}]
    else:
        facts = f"The {another} is {other}. The {shape} is {colour}."
        content = [{"type": "text", "text": f"{facts} {question}"}]
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    if is_solved:
        said = f"<think>The {shape} is {colour}.</think><answer>{colour}</answer>"
        messages.append({"role": "assistant", "content": said})
    return {"messages": messages, "answer": colour}


def _picture(draw: random.Random, shape: str, colour: str) -> Image.Image:
    size = draw.randint(SIDE // 3, SIDE // 2)
    x, y = (draw.randint(2, SIDE - size - 2) for _ in "xy")
    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas = ImageDraw.Draw(image)
    (canvas.ellipse if shape == "circle" else canvas.rectangle)((x, y, x + size, y + size), fill=COLOURS[colour])
    return image


if __name__ == "__main__":
    run_command(main)
