"""Preference runs as commands: pairs about images are learned, the best checkpoint is kept, a killed run goes on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import flags, write_pairs
from helpers.commands_here import start_anew
from helpers.killed_runs import KillableCommand, lines_in, python
from helpers.run_folders import check_listed
from safetensors.torch import load_file

from lmm_r1.cli import train_dpo
from lmm_r1.host.checkpoint_folder import tags
from lmm_r1.records.run_folder import read_stage

pytestmark = pytest.mark.slow


def settings(model: Path, folder: Path, *, run: str) -> dict[str, object]:
    return {
        "model.model_name_or_path": model,
        "model.beta": 0.5,
        "data.dataset": folder / "rows.jsonl",
        "data.max_len": 128,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "train.max_epochs": 30,
        "adam.lr": 0.005,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": folder / run,
    }


def lines_of(run: Path) -> list[dict[str, float]]:
    check_listed(run)
    return list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))


def test_eight_pairs_about_images_are_learned(tiny_checkpoint, tmp_path, own_environment, monkeypatch):
    start_anew(monkeypatch)
    write_pairs(tmp_path)
    held_out = {
        "eval.dataset": tmp_path / "rows.jsonl",
        "eval.steps": 15,
        "ckpt.best_metric_key": "eval_pair_accuracy",
    }
    values = settings(tiny_checkpoint("qwen2_5_vl"), tmp_path, run="run") | held_out
    train_dpo.main([*flags(values), "--eval.before_training"])

    run = tmp_path / "run"
    lines = lines_of(run)
    trained = {line["step"]: line for line in lines if "loss" in line}
    evaluated = {line["step"]: line for line in lines if "eval_loss" in line}
    assert trained[1]["loss"] == pytest.approx(0.693147, abs=1e-4), "the policy starts as its reference"
    assert trained[1]["reward_margin"] == pytest.approx(0.0, abs=1e-4)
    assert trained[30]["loss"] < 0.1
    assert trained[30]["pair_accuracy"] == 1.0
    assert trained[30]["reward_margin"] > 3.0
    assert list(evaluated) == [0, 15, 30]
    assert evaluated[0]["eval_loss"] == pytest.approx(0.693147, abs=1e-4)
    # Half of the pairs prefer what the others reject, so that this takes a look at the pictures.
    assert evaluated[30]["eval_pair_accuracy"] == 1.0
    assert evaluated[30]["eval_loss"] < trained[30]["loss"]
    assert any(tag.startswith("best_global_step") for tag in tags(run / "checkpoints"))
    assert (read_stage(run).kind, read_stage(run).steps) == ("dpo", 30)
    assert (run / "model.safetensors").exists()


@pytest.mark.parametrize("lora", [{}, {"ds.lora.rank": 4, "adam.lr": 0.02}], ids=["full", "adapters"])
def test_a_killed_run_goes_on_to_the_same_curve(lora, tiny_checkpoint: Callable[[str], Path], tmp_path):
    write_pairs(tmp_path)
    few = {"train.batch_size": 2, "train.micro_batch_size": 1, "train.max_epochs": 2} | lora
    few |= {"ckpt.save_steps": 1, "ckpt.max_num": 1}
    whole, killed = (
        KillableCommand(
            argv=python(
                "lmm_r1.cli.train_dpo", *flags(settings(tiny_checkpoint("qwen2_5_vl"), tmp_path, run=run) | few)
            ),
            cwd=tmp_path,
        )
        for run in ("whole", "killed")
    )
    assert killed.run(kill=lines_in(tmp_path / "killed" / "metrics.jsonl", 5), limit_s=240).killed
    for command in (whole, killed):
        ended = command.run_here()
        assert ended.code == 0, ended.output
    curves = [
        [(line["step"], line["loss"], line["reward_margin"], line["chosen_reward"]) for line in lines_of(folder)]
        for folder in (tmp_path / "killed", tmp_path / "whole")
    ]
    assert [step for step, *_ in curves[0]] == list(range(1, 9))
    assert curves[0] == curves[1], "the reference is the model that the first session started from"
    weights, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("killed", "whole"))
    assert all((weights[name] == tensor).all() for name, tensor in wanted.items())
