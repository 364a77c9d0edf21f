"""Supervised runs that are killed in the middle of what they do with files, and repeated as they were."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import flags, write_rows
from helpers.killed_runs import KillableCommand, Moment, appears, lines_in, python
from safetensors.torch import load_file

from lmm_r1.trainer.checkpoint_writing import DELETING
from lmm_r1.trainer.checkpoints import SAVING, complete_steps

pytestmark = [pytest.mark.integration, pytest.mark.slow]
STEPS = 6


@pytest.fixture(scope="module")
def make_command(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """A function that gives the command of a run in a new folder, and the folder."""
    data = tmp_path_factory.mktemp("rows")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} + 1?"},
                {"role": "assistant", "content": f"<answer>{number + 1}</answer>"},
            ],
            "answer": str(number + 1),
        }
        for number in range(2 * STEPS)
    ]
    values = {
        "model.model_name_or_path": tiny_checkpoint("llm"),
        "data.dataset": write_rows(data, *rows),
        "train.batch_size": 2,
        "train.micro_batch_size": 1,
        "train.max_epochs": 1,
        "ds.param_dtype": "fp32",
        "adam.lr": 1e-2,
        "ckpt.save_steps": 1,
        "ckpt.max_num": 1,
    }

    def made() -> tuple[KillableCommand, Path]:
        folder = tmp_path_factory.mktemp("run")
        paths = {"ckpt.output_dir": folder / "model", "ckpt.path": folder / "model/checkpoints"}
        argv = python("lmm_r1.cli.train_sft", *flags(values | paths), "--ckpt.load_enable")
        return KillableCommand(argv=argv, cwd=folder), folder / "model"

    return made


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def test_a_run_killed_in_saves_and_in_an_eviction_ends_as_one_that_was_not(make_command):
    command, expected = make_command()
    whole = command.run(limit_s=120)
    assert whole.code == 0, whole.output
    assert [step for step, _ in losses(expected)] == list(range(1, STEPS + 1))
    assert len({loss for _, loss in losses(expected)}) == STEPS

    command, run = make_command()
    checkpoints = run / "checkpoints"
    moments: dict[str, Moment] = {
        "in the first save": appears(checkpoints, f"{SAVING}global_step1"),
        "in an eviction": appears(checkpoints, f"{DELETING}global_step1*"),
        "in a save": appears(checkpoints, f"{SAVING}global_step4"),
        "in a step": lines_in(run / "metrics.jsonl", 5),
    }
    for name, moment in moments.items():
        ended = command.run(kill=moment, limit_s=120)
        assert ended.killed, f"{name}: {ended.output}"
        steps = complete_steps(checkpoints)
        assert steps or name == "in the first save", name
        assert not (run / "stage.json").exists()
    ended = command.run(limit_s=120)
    assert ended.code == 0, ended.output
    assert complete_steps(checkpoints) == [STEPS]
    assert losses(run) == losses(expected), "the same data in the same order, and no step twice"
    weights, wanted = (load_file(folder / "model.safetensors") for folder in (run, expected))
    assert weights.keys() == wanted.keys()
    assert all((weights[name] == tensor).all() for name, tensor in wanted.items())
    assert json.loads((run / "stage.json").read_text())["steps"] == STEPS
