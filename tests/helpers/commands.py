"""Commands with bad input, down to the one sentence they end with, and the commands of the shipped scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.tables import table
from PIL import Image

from lmm_r1.cli.arguments import parse
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, RMConfig, SFTConfig, resolve

QUESTION = {"messages": [{"role": "user", "content": "What is 1+1?"}], "answer": "2"}
ANSWERED = {"messages": [*QUESTION["messages"], {"role": "assistant", "content": "<answer>2</answer>"}], "answer": "2"}

# What RL would have to ask with an answer in front.
TWO_ANSWERS = {**ANSWERED, "messages": ANSWERED["messages"] * 2}


# Of an RL run: two prompts with two responses each in a step, on pretended GPUs.
SMALL_RUN: dict[str, object] = table("helpers/commands", "small_run")


def with_image(source: str, *, base: dict = QUESTION) -> dict:
    """A row whose question holds an image."""
    content = [{"type": "image", "image": source}, {"type": "text", "text": "What is 1+1?"}]
    return {**base, "messages": [{"role": "user", "content": content}, *base["messages"][1:]]}


def write_rows(folder: Path, *rows: dict | str) -> Path:
    """rows.jsonl with one line per row; a text is written as it is."""
    file = folder / "rows.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def write_pictures(folder: Path) -> list[str]:
    """Eight pictures of 56 x 56 pixels, each of another colour, and their names."""
    names = [f"{number}.png" for number in range(8)]
    for number, name in enumerate(names):
        shade = 30 * number
        Image.new("RGB", (56, 56), (shade, 255 - shade, (shade * 5) % 256)).save(folder / name)
    return names


def write_pairs(folder: Path) -> Path:
    """Eight pairs with one question about eight pictures: what half of them prefer, the other half rejects."""
    lines, answers = [], ("<answer>46</answer>", "<answer>12</answer>")
    for number, name in enumerate(write_pictures(folder)):
        chosen, rejected = answers if number % 2 else answers[::-1]
        prompt = [{"role": "user", "content": "<image>Which digit does the picture show?"}]
        lines.append({"prompt": prompt, "images": [name], "chosen": chosen, "rejected": rejected})
    return write_rows(folder, *lines)


# Responses of a random model are all wrong; these rewards differ, so that updates move the weights.
REWARD = """
import zlib
def reward_func(queries, prompts, labels):
    return {"rewards": [zlib.crc32(query.encode()) / 2**32 for query in queries]}
"""


def without_ray(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make this the current folder of commands that are not to start Ray, with a reward function in it."""

    def refuse(**arguments: object) -> NoReturn:
        raise AssertionError(f"Ray was started with {arguments}")

    patch.chdir(folder)
    patch.setattr("ray.init", refuse)
    (folder / "reward.py").write_text(REWARD)


def ppo(model: Path | str, **changes: object) -> list[str]:
    """The flags of a small RL run on rows.jsonl and reward.py, in which `__` stands for a dot."""
    own = {"actor.model_name_or_path": model, "data.prompt_dataset": "rows.jsonl", "reward.remote_url": "reward.py"}
    return flags(SMALL_RUN | own | {name.replace("__", "."): value for name, value in changes.items()})


def supervised(model: Path | str, **changes: object) -> list[str]:
    """The flags of a small supervised run on rows.jsonl."""
    values: dict[str, object] = {
        "model.model_name_or_path": model,
        "data.dataset": "rows.jsonl",
        "train.batch_size": 2,
        "train.micro_batch_size": 1,
        "ckpt.output_dir": "out",
        "ds.param_dtype": "fp32",
    }
    return flags(values | {name.replace("__", "."): value for name, value in changes.items()})


def flags(values: dict[str, object]) -> list[str]:
    """`{"train.seed": 1}` as `["--train.seed", "1"]`."""
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def error_of(command: str, argv: Sequence[str], *, capfd: pytest.CaptureFixture[str], code: int = 1) -> str:
    """The sentence with which `lmm-r1 COMMAND` ends in this process; fails if anything else reaches stderr."""
    main = import_module(f"lmm_r1.cli.{command}").main
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == code
    assert not ("ray" in sys.modules and sys.modules["ray"].is_initialized())
    return one_sentence(capfd.readouterr().err, prefix=f"lmm-r1 {command}: error: ")


def lines_of_error(command: str, argv: Sequence[str], *, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The sentence and the lines below it with which `lmm-r1 COMMAND` ends where several things are wrong."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        import_module(f"lmm_r1.cli.{command}").main(argv)
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith(f"lmm-r1 {command}: error: "), said
    return said.removeprefix(f"lmm-r1 {command}: error: ").splitlines()


def error_of_process(module: str, argv: Sequence[str], *, cwd: Path, prefix: str, env: dict[str, str]) -> str:
    """The sentence with which `python -m MODULE` ends with code 1 in a process of its own."""
    command = [sys.executable, "-m", module, *argv]
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    return one_sentence(ended.stderr, prefix=prefix)


def one_sentence(said: str, *, prefix: str) -> str:
    """What stderr holds behind the prefix; fails unless it is one line."""
    assert said.startswith(prefix), said
    assert said.endswith("\n"), said
    assert said.count("\n") == 1, said
    return said.removeprefix(prefix).rstrip("\n")


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content, and every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
STAGES = SCRIPTS / "lmm_r1"
TRAINERS = {
    "lmm_r1.cli.train_ppo_ray": PPOConfig,
    "lmm_r1.cli.train_sft": SFTConfig,
    "lmm_r1.cli.train_dpo": DPOConfig,
    "lmm_r1.cli.train_kd": KDConfig,
    "lmm_r1.cli.train_rm": RMConfig,
}


def printed_commands(script: Path, *flags: str, folder: Path, **variables: str) -> list[list[str]]:
    """Run a script with DRY_RUN=1 in an empty folder and return the commands it prints, argument by argument."""
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "PYTHON": sys.executable} | variables
    done = subprocess.run(
        ["bash", str(script), *flags], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return [block.split("\n") for block in done.stdout.strip().split("\n\n")]


def trainer_config(command: list[str]) -> PPOConfig | SFTConfig | DPOConfig | RMConfig:
    """Return the resolved settings of a printed training command."""
    (module,) = (argument for argument in command if argument in TRAINERS)
    argv = command[command.index(module) + 1 :]
    return resolve(parse(TRAINERS[module], argv, prog=module, description=""))
