"""Commands that are killed at 20 random moments each: the next try writes the whole output.

A command that does not resume leaves all of its output or none.
"""

import hashlib
import json
import random
import re
import time
from pathlib import Path

import pytest
import torch
from helpers.killed_runs import KillableCommand
from helpers.processes import warm_python
from helpers.tiny_models import build_checkpoint, make_actor
from PIL import Image

from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.adapters import adapted_layers, save_adapter

pytestmark = [pytest.mark.slow, pytest.mark.full]

KILLS = 20


def digests(folder: Path) -> dict[str, str]:
    """The hash of each file of an output, which may be a file itself; none if it is not there."""
    files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    # Pages and records say when they were written, and how long that took.
    varying = rb"20[0-9: -]+UTC|\"seconds\": [0-9.]+|[0-9.]+ s\b"
    contents = {str(file.relative_to(folder)): re.sub(varying, b"", file.read_bytes()) for file in files}
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def rows(folder: Path) -> None:
    folder.mkdir()
    lines = []
    for number in range(60):
        Image.new("RGB", (200, 200), (number, 0, 0)).save(folder / f"{number}.png")
        content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "Which red?"}]
        lines.append(json.dumps({"messages": [{"role": "user", "content": content}], "answer": str(number)}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def run_folder(folder: Path) -> None:
    folder.mkdir()
    lines = [json.dumps({"step": step, "seconds": float(step), "reward": step / 400}) for step in range(1, 400)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def adapter(folder: Path) -> None:
    folder.mkdir()
    build_checkpoint(get_kit("llm"), folder / "base")
    model = make_actor(folder / "base", lora_rank=4, lora_alpha=8).model
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    save_adapter(model, folder / "adapter")


COMMANDS = {
    "merge": (adapter, ["--adapter", "input/adapter", "--output", "output"], "output"),
    "check_data": (rows, ["input/rows.jsonl", "--output", "output.json"], "output.json"),
    "report": (run_folder, ["input", "--output", "output.html"], "output.html"),
    "make_task": (rows, ["digits", "--rows", "200", "--output", "output"], "output"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_all_of_its_output_or_none(name, tmp_path):
    prepare, arguments, output = COMMANDS[name]
    prepare(tmp_path / "input")
    argv = [warm_python(), "-m", f"lmm_r1.cli.{name}", *arguments]
    command, written = KillableCommand(argv=argv, cwd=tmp_path), tmp_path / output
    # The first try also starts what the others are forked from.
    seconds = min(_seconds(command, written) for _ in range(2))
    whole, inputs = digests(written), digests(tmp_path / "input")
    draw, killed = random.Random(name), 0
    for _ in range(KILLS):
        _remove(written)
        moment = time.monotonic() + draw.uniform(0.1, 1.0) * seconds
        ended = command.run(kill=lambda moment=moment: time.monotonic() > moment, limit_s=300)
        killed += ended.killed
        found = digests(written) if written.exists() else {}
        assert found in ({}, whole), "half of an output"
        assert digests(tmp_path / "input") == inputs
    _remove(written)
    ended = command.run(limit_s=300)
    assert ended.code == 0, ended.output
    assert digests(written) == whole
    assert killed > 0, "it was too quick for each of the moments"


def _seconds(command: KillableCommand, written: Path) -> float:
    _remove(written)
    began = time.monotonic()
    ended = command.run(limit_s=300)
    assert ended.code == 0, ended.output
    return time.monotonic() - began


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    elif path.exists():
        path.unlink()
