"""The smoke script types real commands, compares them with the CPU's figures, and goes on after a stage that hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
REFERENCE = BENCHMARKS / "results/smoke_cpu.json"


def smoke(file: Path, *flags: str, code: int) -> dict[str, Any]:
    """Run the script without cards and return the content of its file."""
    command = [sys.executable, str(BENCHMARKS / "gpu_smoke.py"), "--output", str(file), *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert ended.returncode == code, ended.stderr[-4000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == json.loads(file.read_text())
    return json.loads(file.read_text())


def test_commands_have_the_figures_of_the_reference_and_one_for_gpus_is_not_run(tmp_path):
    stages = ("train_sft", "serve_chat", "rl_fp16")
    content = smoke(tmp_path / "smoke.json", "--stages", *stages, "--compare", str(REFERENCE), code=0)
    summary, results = content["summary"], content["stages"]["commands"]["results"]
    assert summary["passed"] == ["train_sft", "serve_chat"]
    assert results["rl_fp16"] == {"needs": "a GPU", "took_s": results["rl_fp16"]["took_s"], "ok": None}
    assert len(results["serve_chat"]["figures"]["responses"]["value"]) == 20
    assert [results["train_sft"]["figures"][f"loss/{step}"]["ok"] for step in (1, 2)] == [True, True]


def test_a_stage_that_is_not_done_in_time_is_a_result_and_the_next_one_runs(tmp_path):
    content = smoke(tmp_path / "smoke.json", "--stages", "train_rm", "train_dpo", "--limit_s", "0", code=1)
    assert content["summary"]["failed"] == ["train_rm", "train_dpo"]
    for result in content["stages"]["commands"]["results"].values():
        assert "was not done within the stage's 0 s" in result["error"]
