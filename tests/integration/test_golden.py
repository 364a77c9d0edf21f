"""The golden record repeats on one machine, and a planted difference is found by its name."""

import json
import subprocess
from pathlib import Path

import pytest
from helpers.processes import warm_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def golden(do: str, *arguments: str) -> tuple[int, list[str]]:
    command = [warm_python(), str(BENCHMARKS / "golden.py"), do, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    return ended.returncode, ended.stdout.splitlines()


def test_rows_are_as_recorded():
    assert golden("compare", "rows")[1][-1] == "0 differences"


def test_a_rollout_repeats_and_another_setting_is_found_in_metrics_and_weights(tmp_path):
    case = ("rl/entropy", "--folder", str(tmp_path))
    golden("record", *case)
    assert golden("compare", *case)[1][-1] == "0 differences"
    code, told = golden("compare", *case, "--flags", "--actor.entropy_coef", "0.06")
    for what in ("metrics actor_grad_norm: recorded", "policy lm_head.weight: norm of its change recorded"):
        assert (code, any(line.startswith(f"  rl/entropy step 1 {what}") for line in told)) == (1, True), what


def test_another_record_is_found_with_both_values(tmp_path):
    recorded = json.loads((BENCHMARKS / "golden/rows.json").read_text())
    recorded["lmm_r1/rows.jsonl"]["rows"]["0"]["answer"] = "another"
    (tmp_path / "rows.json").write_text(json.dumps(recorded))
    code, told = golden("compare", "rows/lmm_r1/rows.jsonl", "--folder", str(tmp_path))
    assert code == 1
    assert told[1].startswith("  rows/lmm_r1/rows.jsonl rows 0 answer: recorded 'another', now ")
