"""Process reward runs as commands: eight rows about images are learned, and a killed run goes on to the same curve."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import flags, write_pictures
from helpers.commands_here import run_here, start_anew
from helpers.killed_runs import KillableCommand, lines_in, python
from helpers.reward_servers import running
from safetensors.torch import load_file

from lmm_r1.cli import batch_inference, train_prm
from lmm_r1.records.run_folder import read_stage

pytestmark = pytest.mark.slow

ANSWERS = ("<answer>46</answer>", "<answer>12</answer>")
STEPS = 20


def write_rows(folder: Path) -> None:
    """Eight rows with one question about eight pictures: what is right of half of them, is wrong of the others."""
    steps = []
    for number, name in enumerate(write_pictures(folder)):
        prompt = [{"role": "user", "content": "<image>Which digit does the picture show?"}]
        asked = {"prompt": prompt, "images": [name]}
        right = bool(number % 2)
        steps.append(asked | {"completions": ["I see 46", "46 it is"], "labels": [right, not right]})
    (folder / "train_prm.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))


def command_line(model: Path, folder: Path, *, module: str, run: str) -> list[str]:
    own: dict[str, dict[str, Any]] = {"train_prm": {"model.placeholder_token": "*"}}
    values = {
        "model.model_name_or_path": model,
        "data.dataset": folder / f"{module}.jsonl",
        "data.max_len": 128,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "train.max_epochs": STEPS,
        "adam.lr": 0.005,
        "ds.param_dtype": "fp32",
        "eval.dataset": folder / f"{module}.jsonl",
        "eval.split": "train",
        "eval.steps": STEPS,
        "data.dataloader_num_workers": 1,
        "ckpt.output_dir": folder / run,
        "ckpt.save_steps": 2,
        "ckpt.max_num": 1,
        **own[module],
    }
    packs = ["--ds.packing_samples"] if module == "train_prm" else []
    return [*flags(values), "--eval.before_training", *packs]


@pytest.fixture
def in_process(own_environment: None, monkeypatch: pytest.MonkeyPatch):
    """A function that runs a training command in this process."""

    def run(module: Any, argv: list[str]) -> None:
        start_anew(monkeypatch)
        module.main(argv)

    return run


def lines_of(run: Path) -> list[dict[str, float]]:
    return records_of(run / "metrics.jsonl")


def records_of(file: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, file.read_text().splitlines()))


def check_best_of_two(model: Path, folder: Path, *, policy: Path) -> None:
    """By the last step's score the trained model prefers one step or both, as the picture says."""
    question = {"type": "text", "text": "Which digit does the picture show?"}
    responses = [{"text": "I see 46"}, {"text": "I see 46\n\n 46 it is\n"}, {"text": " "}]
    given = [
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": f"{number}.png"}, question]}]}
        for number in range(8)
    ]
    (folder / "given.jsonl").write_text("".join(json.dumps(one | {"responses": responses}) + "\n" for one in given))
    values = {"eval_task": "rm", "model": model, "data": folder / "given.jsonl", "output": folder / "scored.jsonl"}
    values |= {"select": "best_of_n", "selected": folder / "best.jsonl", "step_scores": "last"}
    batch_inference.main(flags(values))
    best = records_of(folder / "best.jsonl")
    chosen = [responses.index({"text": row["messages"][-1]["content"]}) for row in best]
    assert chosen == [1, 0] * 4
    scored = records_of(folder / "scored.jsonl")
    one, both, none = scored[1]["responses"]
    assert (one["scores"]["steps"], both["scores"]["steps"], none["scores"]["steps"]) == (1, 2, 0)
    # The first step is the same in both, and right, and the second wrong.
    assert one["reward"] == pytest.approx(one["scores"]["steps_min"], rel=1e-5)
    assert one["reward"] > 0.9 > 0.1 > both["reward"] == both["scores"]["steps_last"] == both["scores"]["steps_min"]
    assert both["scores"]["steps_product"] == pytest.approx(one["reward"] * both["reward"], rel=1e-4)
    assert none["reward"] == 0.0
    check_served(model, folder, policy=policy)


def check_served(model: Path, folder: Path, *, policy: Path) -> None:
    """Behind HTTP the model scores as it does here, and a policy is rewarded by it."""
    given = {"model": model, "dtype": "fp32", "port": 0, "image_root": folder, "step_scores": "last"}
    command = [sys.executable, "-m", "lmm_r1.cli.serve_rm", *flags(given)]
    with running(command, env={"OMP_NUM_THREADS": "1"}) as server:
        values = {"eval_task": "rm", "model": f"{server.address}/get_reward", "data": folder / "given.jsonl"}
        values |= {"output": folder / "served.jsonl", "select": "best_of_n", "selected": folder / "best_served.jsonl"}
        batch_inference.main(flags(values))
        check_rl(model, folder, reward=f"{server.address}/get_reward", policy=policy)
    best = [[one["messages"] for one in records_of(folder / f"{name}.jsonl")] for name in ("best", "best_served")]
    assert best[0] == best[1]
    here, served = (
        [one["responses"] for one in records_of(folder / f"{name}.jsonl")] for name in ("scored", "served")
    )
    for one, other in zip(sum(here, []), sum(served, []), strict=True):
        assert other["scores"] == pytest.approx(one["scores"] | {"timed_out": 0.0}, abs=1e-5)


def check_rl(model: Path, folder: Path, *, reward: str, policy: Path) -> None:
    """Two steps of RL about the pictures: each response has the reward, and the parts, that the served model gives it here."""
    rows = [
        {"messages": row["prompt"], "images": row["images"], "answer": "46"}
        for row in records_of(folder / "train_prm.jsonl")
    ]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "actor.model_name_or_path": policy,
        "data.prompt_dataset": "asked.jsonl",
        "data.max_len": 128,
        "reward.remote_url": reward,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 2,
        "rollout.max_new_tokens": 12,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "ds.param_dtype": "fp32",
        "algo.kl.init_coef": 0,
        "ckpt.output_dir": "rl",
    }
    ended = run_here("train_ppo_ray", [*flags(values), "--train.colocate_all"], folder=folder)
    assert ended.code == 0, ended.stderr
    metrics, rollouts = (records_of(folder / "rl" / f"{name}.jsonl") for name in ("metrics", "rollouts"))
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(0 < line["steps"] and 0 < line["steps_last"] < 1 for line in metrics)
    given = [{"prompt": one["messages"], "responses": [{"text": one["response"]}]} for one in rollouts]
    (folder / "rl/given.jsonl").write_text("".join(json.dumps(one) + "\n" for one in given))
    here = {"eval_task": "rm", "model": model, "data": folder / "rl/given.jsonl", "step_scores": "last"}
    batch_inference.main(flags(here | {"output": folder / "rl/scored.jsonl"}))
    for rollout, row in zip(rollouts, records_of(folder / "rl/scored.jsonl"), strict=True):
        (expected,) = row["responses"]
        assert rollout["reward"] == pytest.approx(expected["reward"], abs=1e-5)
        assert rollout["scores"]["steps"] == expected["scores"]["steps"]
    assert len({rollout["reward"] for rollout in rollouts}) > 4


@pytest.mark.parametrize("module", [train_prm], ids=["train_prm"])
def test_eight_rows_about_images_are_learned_and_a_killed_run_goes_on_to_the_same_curve(
    module, tiny_checkpoint, tmp_path, in_process
):
    name = module.__name__.rpartition(".")[2]
    model = tiny_checkpoint("qwen2_5_vl")
    write_rows(tmp_path)
    in_process(module, command_line(model, tmp_path, module=name, run="whole"))
    whole = lines_of(tmp_path / "whole")
    trained = {line["step"]: line for line in whole if "loss" in line}
    first, evaluated = (line for line in whole if "eval_loss" in line)
    assert (first["step"], evaluated["step"]) == (0, STEPS)
    assert first["eval_loss"] == pytest.approx(trained[1]["loss"], rel=1e-4)
    assert (read_stage(tmp_path / "whole").kind, read_stage(tmp_path / "whole").steps) == (name[-3:], STEPS)
    # Of each picture's two steps one is right, so that the picture is what tells.
    assert trained[STEPS]["step_accuracy"] == evaluated["eval_step_accuracy"] == 1.0
    check_best_of_two(tmp_path / "whole", tmp_path, policy=model)
    assert trained[STEPS]["loss"] < 0.05
    assert evaluated["eval_loss"] < 0.05

    argv = command_line(model, tmp_path, module=name, run="killed")
    command = KillableCommand(argv=python(f"lmm_r1.cli.{name}", *argv), cwd=tmp_path)
    ended = command.run(kill=lines_in(tmp_path / "killed" / "metrics.jsonl", 3), limit_s=240)
    assert ended.killed, ended.output
    in_process(module, argv)
    timeless = [
        [{key: value for key, value in line.items() if "second" not in key} for line in lines_of(tmp_path / run)]
        for run in ("killed", "whole")
    ]
    assert timeless[0] == timeless[1]
    weights, wanted = (load_file(tmp_path / run / "model.safetensors") for run in ("killed", "whole"))
    assert all((weights[key] == tensor).all() for key, tensor in wanted.items())
