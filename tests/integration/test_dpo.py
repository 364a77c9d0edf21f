"""Preference runs as commands: pairs about images are learned, the best checkpoint is kept, a killed run goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def settings(model: Path, folder: Path, *, run: str, **changes: object) -> dict[str, Any]:
    values = {
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
    return values | {name.replace("__", "."): value for name, value in changes.items()}


def lines_of(run: Path) -> list[dict[str, float]]:
    check_listed(run)
    return list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))


def test_eight_pairs_about_images_are_learned(tiny_checkpoint, tmp_path, own_environment, monkeypatch):
    start_anew(monkeypatch)
    write_pairs(tmp_path)
    held_out = {
        "eval__dataset": tmp_path / "rows.jsonl",
        "eval__steps": 15,
        "ckpt__best_metric_key": "eval_pair_accuracy",
    }
    values = settings(tiny_checkpoint("qwen2_5_vl"), tmp_path, run="run", **held_out)
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


@pytest.fixture(scope="module")
def make_command(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """A function that gives the command of a run of its own, and its folder."""
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder)

    def made(run: str, *switches: str, module: str = "train_dpo", **changes: object) -> tuple[KillableCommand, Path]:
        given = {"train__batch_size": 2, "train__micro_batch_size": 1, "train__max_epochs": 2, "ckpt__save_steps": 1}
        values = settings(tiny_checkpoint("qwen2_5_vl"), folder, run=run, **given | {"ckpt__max_num": 1} | changes)
        if module == "train_rm":
            values.pop("model.beta")
        argv = python(f"lmm_r1.cli.{module}", *flags(values), *switches)
        return KillableCommand(argv=argv, cwd=folder), folder / run

    return made


KILLED = {"full": {}, "adapters": {"ds__lora__rank": 4, "adam__lr": 0.02}, "rewards": {"module": "train_rm"}}


@pytest.mark.parametrize("kind", KILLED)
def test_a_killed_run_goes_on_to_the_same_curve(kind, make_command):
    changes = KILLED[kind]
    command, expected = make_command(f"{kind}-whole", **changes)
    whole = command.run_here()
    assert whole.code == 0, whole.output
    command, run = make_command(f"{kind}-killed", **changes)
    for count in (3, 6) if kind == "full" else (5,):
        ended = command.run(kill=lines_in(run / "metrics.jsonl", count), limit_s=240)
        assert ended.killed, ended.output
    ended = command.run_here()
    assert ended.code == 0, ended.output
    curves = [
        [(line["step"], line["loss"], line["reward_margin"], line["chosen_reward"]) for line in lines_of(folder)]
        for folder in (run, expected)
    ]
    assert [step for step, *_ in curves[0]] == list(range(1, 9))
    assert curves[0] == curves[1], "the reference is the model that the first session started from"
    weights, wanted = (load_file(folder / "model.safetensors") for folder in (run, expected))
    assert all((weights[name] == tensor).all() for name, tensor in wanted.items())
