"""`lmm-r1 init DIR`: a folder with rows, settings and a reward function that train, measure and chat as they are.

With `--model` and `--rows`, the settings are those of RL of that model on those rows, on this machine or another one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml
from PIL import Image, ImageDraw

from lmm_r1.cli import arguments, run_command, user_errors
from lmm_r1.cli.plan import MachineFlags, fitting_flags
from lmm_r1.config.declared import Positional
from lmm_r1.data.files import read_row_file, write_row_folder
from lmm_r1.data.messages import ImagePart, Row, TextPart
from lmm_r1.data.reading import RowReading, shipped_prompt
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_new_folder, unwritable, write_atomically
from lmm_r1.lmm_kits.registry import released_configs, released_folder

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
        content = [{"type": "text", "text": f"The {another} is {other}. The {shape} is {colour}. {question}"}]
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


HELD_OUT = 10
"""Of so many rows of a JSONL file, one is kept for the evaluation."""
PROMPTS = 2000
"""Prompts of a run: fewer rows are repeated."""
MOST_REPEATED = 100
LENGTH_STEP = 64
PROMPT = "think"
NOTES = {
    "data.system_prompt": "asks for the format that reward.py rewards",
    "data.max_pixels": "larger images are scaled down; more pixels show more detail and need more memory",
    "data.max_len": "tokens of the longest prompt with its images, and of a response",
    "reward.remote_url": "also: math, or math=1,format=0.5,FILE.py:NAME=0.1",
    "rollout.n_samples_per_prompt": "responses to each prompt, which are compared",
    "train.num_episodes": "passes over the rows",
    "actor.adam.lr": "for a tiny model; remove it for a pretrained one",
    "algo.kl.init_coef": "no KL penalty",
    "ds.lora.rank": "trains adapters; alpha and learning rate follow",
}
COMMANDS = """\
lmm-r1 check_data {rows} --model {model} --reward {folder}/reward.py:reward{images} --max_len {max_len}
lmm-r1 train_ppo_ray --config {folder}/rl.yaml
lmm-r1 evaluate --config {folder}/evaluate.yaml
lmm-r1 interactive_chat --model {folder}/run
"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a run of a model begins with."""

    pixels: int
    """Of the largest image."""
    response: int
    """Tokens of a response."""
    more: Mapping[str, object]
    """Further settings."""


PRETRAINED = Sizes(pixels=802_816, response=1024, more={})
TINY = Sizes(pixels=50_176, response=64, more={"actor.adam.lr": 2e-4, "algo.kl.init_coef": 0.0})
TINY_BYTES = 200_000_000
"""Size of the weight files below which a model is tiny, as those of `make_tiny_model`; it takes larger steps."""


def write_project(folder: Path, *, model: str, rows: str, machine: MachineFlags) -> None:
    """Write rl.yaml, evaluate.yaml, reward.py and the system prompt, and print the commands that use them.

    Raises UserError if the folder is not empty, the rows cannot be read, or nothing makes the run fit the machine.
    """
    from lmm_r1.lmm_kits.checkpoint import stored_bytes

    check_new_folder(folder.absolute(), flag="DIR")
    prompt = shipped_prompt(PROMPT)
    assert prompt is not None, "it is shipped"
    found = read_row_file(rows, reading=RowReading(system_prompt=prompt)).rows.values()
    sizes = TINY if 0 < stored_bytes(model) < TINY_BYTES else PRETRAINED
    longest = _longest_prompt(found, model=model, pixels=sizes.pixels) + sizes.response
    run, reward = str(folder / "run"), f"{folder}/reward.py:reward"
    flags: dict[str, object] = {
        "actor.model_name_or_path": model,
        "data.system_prompt": str(folder / "system_prompt.txt"),
        "data.max_len": -(-longest // LENGTH_STEP) * LENGTH_STEP,
        "reward.remote_url": reward,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_new_tokens": sizes.response,
        "train.num_episodes": -(-PROMPTS // max(len(found), MOST_REPEATED)),
        "ckpt.output_dir": run,
        **sizes.more,
    }
    pictured = any(isinstance(part, ImagePart) for row in found for message in row.messages for part in message.parts)
    if pictured:
        flags["data.max_pixels"] = sizes.pixels
    fitting = fitting_flags(
        model, machine=machine, flags=flags | {"data.prompt_dataset": rows, "data.system_prompt": PROMPT}
    )
    train, held_out, images = _divided(rows, folder=folder)
    read = {"data.prompt_dataset": train, **{f"data.{name}": value for name, value in images.items()}}
    flags = {"actor.model_name_or_path": model, **read, **flags, **fitting}
    measured: dict[str, object] = {
        "checkpoints": [f"before={model}", f"after={run}"],
        "files": [f"rows={held_out}"],
        "reward": [reward],
        "output": str(folder / "scores.json"),
        "max_model_len": flags["data.max_len"],
        "max_new_tokens": flags["rollout.max_new_tokens"],
        **{name: flags[f"data.{name}"] for name in ("system_prompt", "max_pixels") if f"data.{name}" in flags},
        **images,
    }
    write_atomically(folder / "rl.yaml", text=_yaml("train_ppo_ray", flags))
    write_atomically(folder / "evaluate.yaml", text=_yaml("evaluate", measured))
    code = (resources.files("lmm_r1.cli.project") / "reward.py").read_text(encoding="utf-8")
    write_atomically(folder / "reward.py", text=code)
    write_atomically(folder / "system_prompt.txt", text=f"{prompt}\n")
    print(f"{folder}: rl.yaml, evaluate.yaml, reward.py, system_prompt.txt; next:")
    bound = f" --max_pixels {flags['data.max_pixels']}" if pictured else ""
    print(COMMANDS.format(folder=folder, rows=rows, model=model, images=bound, max_len=flags["data.max_len"]), end="")


def _longest_prompt(rows: Iterable[Row], *, model: str, pixels: int) -> int:
    """Return the tokens of the longest prompt, each of its images as large as the bound allows."""
    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.tools.planning.choices import image_tokens

    is_here = Path(model).is_dir()
    checkpoint = Checkpoint(str(released_folder(model)) if not is_here and model in released_configs() else model)
    image = image_tokens(checkpoint, pixels=pixels) if checkpoint.kit.takes_images else 0

    def tokens(row: Row) -> int:
        parts = [part for message in row.messages for part in message.parts]
        text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
        # Without a tokenizer: there are hardly languages with less than two bytes a token.
        count = len(checkpoint.tokenizer(text)["input_ids"]) if is_here else len(text.encode()) // 2
        # The template adds some around each turn.
        return count + image * sum(isinstance(part, ImagePart) for part in parts) + 16 * len(row.messages)

    return max(map(tokens, rows))


def _divided(rows: str, *, folder: Path) -> tuple[str, str, dict[str, object]]:
    """Return the rows to train on and those to measure on, and the folder of their images if they have moved.

    Lines of a JSONL file are divided; of other rows, all are trained and measured on.
    """
    path = Path(rows)
    if path.suffix != ".jsonl" or not path.is_file():
        return rows, rows, {}
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(lines) < 2 * HELD_OUT:
        return rows, rows, {}
    kept = lines[::HELD_OUT]
    trained = [line for place, line in enumerate(lines) if place % HELD_OUT]
    for name, part in (("train.jsonl", trained), ("held_out.jsonl", kept)):
        write_atomically(folder / name, text="".join(f"{line}\n" for line in part))
    return str(folder / "train.jsonl"), str(folder / "held_out.jsonl"), {"image_dir": str(path.parent.absolute())}


def _yaml(command: str, settings: Mapping[str, object]) -> str:
    """Return settings as a file for `--config`, a line for each, with what some of them are for."""
    lines = [f"# For `lmm-r1 {command} --config`; `lmm-r1 {command} --help-all` lists every setting."]
    for name, value in settings.items():
        shown = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).removesuffix("...\n")
        line = f"{name}: {shown.strip()}"
        lines.append(f"{line}   # {NOTES[name]}" if name in NOTES else line)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    run_command(main)
