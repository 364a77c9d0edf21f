"""Distillation as a command: eight rows with images are learned of a larger teacher, and a killed run goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import commands
from helpers.commands import flags, write_pictures
from helpers.commands_here import start_anew
from helpers.kd_steps import build_teacher
from helpers.killed_runs import KillableCommand, lines_in, python
from helpers.run_folders import check_listed

from lmm_r1.cli import train_kd
from lmm_r1.lmm_kits import get_kit
from lmm_r1.records.run_folder import read_stage

pytestmark = pytest.mark.slow

KIT = "qwen2_5_vl"


def write_rows(folder: Path) -> Path:
    """Eight rows with one question about eight pictures."""
    lines = []
    for number, name in enumerate(write_pictures(folder)):
        question = [{"type": "image", "image": name}, {"type": "text", "text": "Which digit?"}]
        answer = "<answer>46</answer>" if number % 2 else "<answer>12</answer>"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append({"messages": turns})
    return commands.write_rows(folder, *lines)


def settings(student: Path, folder: Path, *, run: str) -> dict[str, Any]:
    return {
        "model.model_name_or_path": student,
        "model.kd_coef": 1.0,
        "teacher.model_name_or_path": folder / "teacher",
        "data.dataset": folder / "rows.jsonl",
        "data.max_len": 128,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "train.max_epochs": 60,
        "adam.lr": 0.005,
        "ds.param_dtype": "fp32",
        "ckpt.save_steps": 20,
        "ckpt.max_num": 1,
        "ckpt.output_dir": folder / run,
    }


def lines_of(run: Path) -> list[dict[str, float]]:
    check_listed(run)
    return list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))


def test_eight_rows_with_images_are_learned_of_a_teacher_and_a_killed_run_goes_on_to_the_same_curve(
    tiny_checkpoint: Callable[[str], Path], tmp_path, own_environment, monkeypatch
):
    start_anew(monkeypatch)
    write_rows(tmp_path)
    build_teacher(get_kit(KIT), tmp_path / "teacher")
    given = settings(tiny_checkpoint(KIT), tmp_path, run="whole")
    held_out = {"eval.dataset": tmp_path / "rows.jsonl", "eval.steps": 60, "ckpt.best_metric_key": "none"}
    train_kd.main([*flags(given | held_out), "--eval.before_training"])
    whole = lines_of(tmp_path / "whole")
    trained = {line["step"]: line for line in whole if "loss" in line}
    evaluated = {line["step"]: line for line in whole if "eval_loss" in line}
    assert trained[1]["kd_loss"] > 1
    assert trained[60]["kd_loss"] < 0.01 * trained[1]["kd_loss"]
    assert trained[60]["loss"] == pytest.approx(trained[60]["kd_loss"])
    assert evaluated[0]["eval_kd_loss"] == pytest.approx(trained[1]["kd_loss"], rel=1e-4)
    assert evaluated[60]["eval_loss"] < 0.01 * evaluated[0]["eval_loss"]
    assert (read_stage(tmp_path / "whole").kind, read_stage(tmp_path / "whole").steps) == ("kd", 60)
    assert (tmp_path / "whole" / "model.safetensors").exists()

    given = settings(tiny_checkpoint(KIT), tmp_path, run="killed")
    command = KillableCommand(argv=python("lmm_r1.cli.train_kd", *flags(given)), cwd=tmp_path)
    run = tmp_path / "killed"
    ended = command.run(kill=lines_in(run / "metrics.jsonl", 30), limit_s=240)
    assert ended.killed, ended.output
    ended = command.run_here()
    assert ended.code == 0, ended.output
    assert "kd resumed at step 20/60" in ended.output
    curve = {line["step"]: line["loss"] for line in lines_of(run)}
    assert curve == pytest.approx({step: line["loss"] for step, line in trained.items()}, rel=1e-4, abs=1e-6)
