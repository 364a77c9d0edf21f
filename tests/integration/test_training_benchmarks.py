"""The benchmarks of training run to their end; sizes are the smallest that can be had."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import warm_python

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STEP = (
    "--prompts",
    "2",
    "--samples",
    "2",
    "--new-tokens",
    "4",
    "--image-side",
    "56",
    "--steps",
    "2",
    "--dtype",
    "fp32",
)
TRAIN_STEP = "--hidden-size 64 --layers 1 --scale 0.06 --samples 2 --repeats 1 --kinds text mixed".split()


def last_line_of(script: str, *flags: str, file: Path) -> dict[str, Any]:
    command = [warm_python(), str(BENCHMARKS / script), *flags, "--output", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == result
    return result


def test_each_way_of_a_step_computes_the_same_and_a_step_of_rl_is_timed_in_its_parts(tmp_path):
    result = last_line_of("train_step.py", *TRAIN_STEP, file=tmp_path / "train_step.json")
    for batch in result["batches"]:
        assert list(batch["ways"]) == ["openrlhf", "padded", "packed", "shared"]
        assert max(batch["max_difference"].values()) < 1e-4
    result = last_line_of("rl_step.py", *STEP, file=tmp_path / "rl_step.json")
    assert all(result["phases"][part] > 0 for part in ("generation", "make_experience", "ppo_train", "broadcast"))
    assert abs(result["mismatch"]["mean_exp"] - 1) < 1e-3
    result = last_line_of("trl_step.py", *STEP, file=tmp_path / "trl_step.json")
    assert [norm > 0 for norm in result["grad_norms"]] == [True, True]


def test_gpu_check_ends_on_the_cpu_with_all_results_of_all_stages(tmp_path):
    sizes = ("--device", "cpu", "--scale", "0.02", "--repeats", "1", "--kits", "llm", "gemma3", "qwen2_5_vl")
    result = last_line_of("gpu_check.py", *sizes, file=tmp_path / "result.json")
    assert list(result["stages"]) == ["a", "b", "c", "d", "e"]
    for stage in result["stages"].values():
        assert stage["left_out"] == []
        assert not [name for name, entry in stage["results"].items() if "error" in entry or "unfinished" in entry]
    for kit in ("llm", "gemma3", "qwen2_5_vl"):
        assert result["stages"]["a"]["results"][f"parity/{kit}"]["judgement"] == "agrees"
