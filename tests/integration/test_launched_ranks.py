"""A supervised command starts a process for each GPU by itself; two of them train and fail as one does."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.commands import ANSWERED, one_sentence, supervised, write_rows
from helpers.commands_here import run_here
from helpers.processes import warm_python

pytestmark = pytest.mark.slow


def in_two(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), "-m", "lmm_r1.cli.train_sft", *argv]
    environment = {**os.environ, "PET_NPROC_PER_NODE": "2"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_two_processes_train_as_one_and_print_as_one(tiny_checkpoint, tmp_path):
    answer = ANSWERED["messages"][-1]
    write_rows(tmp_path, *[{"messages": [{"role": "user", "content": text}, answer]} for text in "abcd"])
    model, given = tiny_checkpoint("llm"), {"train__batch_size": 4, "train__max_epochs": 2, "adam__lr": 1e-3}
    alone = run_here("train_sft", supervised(model, **given, ckpt__output_dir="one"), folder=tmp_path)
    together = in_two(supervised(model, **given, ckpt__output_dir="two"), tmp_path)
    assert (alone.code, together.returncode) == (0, 0), together.stderr
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("one", "two")
    ]
    assert len(losses[0]) == 2
    assert losses[0][1] < 0.99 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert together.stdout.count("sft: 2 processes; PET_NPROC_PER_NODE sets another number\n") == 1
    assert together.stdout.count("sft step 1/2 ") == 1


def test_two_processes_that_fail_end_with_one_sentence(tiny_checkpoint, tmp_path):
    write_rows(tmp_path, ANSWERED, ANSWERED)
    model = tiny_checkpoint("llm")
    (tmp_path / "m").mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / "m" / file.name).symlink_to(file)
    ended = in_two(supervised("m"), tmp_path)
    assert ended.returncode == 1
    sentence = one_sentence(ended.stderr[ended.stderr.index("lmm-r1 ") :], prefix="lmm-r1 train_sft: error: ")
    assert sentence.startswith("m: no weights in this folder")
