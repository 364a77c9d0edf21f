"""The settings that EasyR1's examples start from, converted, train."""

import json
from pathlib import Path

import pytest
from helpers import commands_here
from helpers.commands import write_rows

from lmm_r1.cli.convert_config import main as convert

pytestmark = pytest.mark.slow

EASYR1 = Path(__file__).parents[1] / "data/conversion/easyr1.yaml"
# As EasyR1 calls it, with the argument that its own function of the example takes.
FUNCTION = """REWARD_NAME = "math"
REWARD_TYPE = "batch"

def compute_score(reward_inputs, format_weight=0.1):
    judged = [(one["response"].count("{") % 2, one["ground_truth"] in one["response"]) for one in reward_inputs]
    return [
        {"overall": (1 - format_weight) * right + format_weight * boxed, "format": float(boxed), "accuracy": float(right)}
        for boxed, right in judged
    ]
"""


def test_two_steps_of_easyr1s_configuration(tiny_checkpoint, tmp_path):
    rows = write_rows(tmp_path, *({"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)))
    (tmp_path / "math.jinja").write_text("{{ content | trim }} Put the answer into \\boxed{}.")
    (tmp_path / "math.py").write_text(FUNCTION)
    # What is of one's own machine, and sizes; everything else is as published.
    own = {
        "data.train_files": rows,
        "data.val_files": rows,
        "data.format_prompt": tmp_path / "math.jinja",
        "worker.actor.model.model_path": tiny_checkpoint("llm"),
        "worker.reward.reward_function": f"{tmp_path / 'math.py'}:compute_score",
        "trainer.n_gpus_per_node": 1,
        "worker.rollout.tensor_parallel_size": 1,
        "trainer.save_checkpoint_path": tmp_path / "run",
        "trainer.logger": "[file]",
        "trainer.max_steps": 2,
        "data.max_prompt_length": 64,
        "data.max_response_length": 8,
        "data.rollout_batch_size": 2,
        "worker.actor.global_batch_size": 1,
    }
    convert(
        [str(EASYR1), *(f"{name}={value}" for name, value in own.items()), "--output", str(tmp_path / "ours.yaml")]
    )
    ended = commands_here.run_here("train_ppo_ray", ["--config", str(tmp_path / "ours.yaml")], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "reward" in line]
    assert [row["step"] for row in steps] == [1, 2]
    assert all({"accuracy", "format"} <= row.keys() for row in steps)
