"""The benchmarks of training run, and their last line holds what they promise; sizes are the smallest that can be had."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import warm_python

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WAYS = ["openrlhf", "padded", "packed", "shared"]


def last_line_of(script: str, *flags: str) -> dict[str, Any]:
    command = [warm_python(), str(BENCHMARKS / script), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_train_step_says_what_every_way_computes_holds_and_takes(tmp_path):
    sizes = ["--hidden-size", "64", "--layers", "1", "--scale", "0.06", "--samples", "2", "--repeats", "1"]
    file = tmp_path / "result.json"
    result = last_line_of("train_step.py", *sizes, "--kinds", "text", "mixed", "--output", str(file))
    assert json.loads(file.read_text()) == result
    assert result["benchmark"] == "train_step"
    assert [(batch["kind"], batch["samples"]) for batch in result["batches"]] == [("text", 2), ("mixed", 2)]
    for batch in result["batches"]:
        ways = batch["ways"]
        assert list(ways) == WAYS
        # Two responses to each prompt; where there is no image, the smallest one keeps the vision tower running.
        prompts, filler = batch["prompt_tokens"], 3 if batch["kind"] == "text" else 0
        rows = 2 * len(prompts)
        assert ways["openrlhf"]["tokens_computed"] == rows * batch["padded_to"]
        assert ways["padded"]["tokens_computed"] == (rows + bool(filler)) * batch["padded_to"]
        assert ways["packed"]["tokens_computed"] == batch["unique_tokens"] + sum(prompts) + filler
        assert ways["shared"]["tokens_computed"] == batch["unique_tokens"] + filler
        for way in ways.values():
            assert way["share_of_limit"] == round(batch["unique_tokens"] / way["tokens_computed"], 4)
        assert ways["packed"]["media_bytes_per_group"] == 2 * ways["shared"]["media_bytes_per_group"]
        assert all(way["update_seconds"] > 0 and way["no_grad_seconds"] > 0 for way in ways.values())
        assert all(way["update_peak_mib"] >= 0 for way in ways.values())
        others = [f"{part}_over_{way}" for part in ("update", "no_grad") for way in WAYS[:-1]]
        assert list(batch["speedup_of_shared"]) == others
        assert batch["max_difference"].keys() == {"log_probs", "gradients", "policy_loss"}
        assert max(batch["max_difference"].values()) < 1e-4
    text, mixed = result["batches"]
    assert text["ways"]["shared"]["patches_computed"] == 0
    assert mixed["ways"]["openrlhf"]["patches_computed"] == 2 * mixed["ways"]["shared"]["patches_computed"] > 0


@pytest.mark.full
def test_a_step_of_rl_is_timed_in_its_parts_and_says_what_it_ran_on(tmp_path):
    file = tmp_path / "result.json"
    sizes = ["--prompts", "2", "--samples", "2", "--new-tokens", "4", "--image-side", "56", "--steps", "2"]
    result = last_line_of("rl_step.py", *sizes, "--dtype", "fp32", "--output", str(file))
    assert json.loads(file.read_text()) == result
    parts = ("generation", "make_experience", "ppo_train", "broadcast")
    assert all(result["phases"][part] > 0 for part in parts)
    assert result["first_step_seconds"] > 0
    assert result["start_seconds"] > 0
    assert abs(result["mismatch"]["mean_exp"] - 1) < 1e-3
    assert [norm > 0 for norm in result["grad_norms"]] == [True, True]
    assert (result["model"], result["flags"], result["response_length_mean"]) == ("5M", [], 4)
    assert {"machine", "device", "commit", "versions"} <= result.keys()


@pytest.mark.full
def test_a_step_of_trl_is_timed_on_the_same_work(tmp_path):
    file = tmp_path / "result.json"
    sizes = ["--prompts", "2", "--samples", "2", "--new-tokens", "4", "--image-side", "56", "--steps", "2"]
    result = last_line_of("trl_step.py", *sizes, "--dtype", "fp32", "--output", str(file))
    assert json.loads(file.read_text()) == result
    assert (result["steps_measured"], result["correction"], result["importance_weights"]) == (1, None, None)
    assert [norm > 0 for norm in result["grad_norms"]] == [True, True]
    assert {"machine", "device", "commit", "versions"} <= result.keys()


def test_gpu_check_ends_on_the_cpu_with_all_results_of_all_stages(tmp_path):
    file = tmp_path / "result.json"
    sizes = ["--device", "cpu", "--scale", "0.02", "--repeats", "1", "--output", str(file)]
    result = last_line_of("gpu_check.py", *sizes, "--kits", "llm", "gemma3", "qwen2_5_vl")
    assert json.loads(file.read_text()) == result
    assert list(result["stages"]) == ["a", "b", "c", "d", "e"]
    for stage in result["stages"].values():
        assert stage["left_out"] == []
        assert not [name for name, entry in stage["results"].items() if "error" in entry or "unfinished" in entry]
    for kit in ("llm", "gemma3", "qwen2_5_vl"):
        entry = result["stages"]["a"]["results"][f"parity/{kit}"]
        assert entry["judgement"] == "agrees"
        assert max(value for way in entry["differences"]["fp32"].values() for value in way.values()) < 1e-4
        assert min(entry["differences"]["bf16"]["shared"].values()) > 1e-4
    sent = result["stages"]["e"]["results"]
    assert sent["ipc/tensors"]["calls"] == sent["ipc/tensors"]["tensors"] == 16
    assert 1 < sent["ipc/buckets"]["calls"] < 16
    assert sent["ipc/buckets"]["bytes"] == sent["ipc/tensors"]["bytes"]
    assert sent["adam/deepspeed_fused"]["absent"].startswith("a GPU")
    for name in ("zero_2", "zero_3", "zero_3_adam_offload"):
        assert sent[name]["adam"] == {"torch_adam": True, "chosen_by": "lmm_r1.host.strategy"}
        assert sent[name]["seconds"] > 0
