"""Rows in every format, and rows of other projects, train supervised and RL steps through the commands without a format flag."""

import json
import re
from pathlib import Path

import pytest
from helpers.commands import flags
from helpers.commands_here import run_here

from lmm_r1.data.formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "datasets" / "samples"
REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(len(query) % 2) for query in queries]}\n"
# Thirteen formats with two rows each, and VLMEvalKit's third one.
ROWS = 27

pytestmark = pytest.mark.slow


def run(command: str, folder: Path, *switches: str, **values: object) -> list[tuple[str, str]]:
    """Run a command that must succeed, and return the number of rows and the format of each file that it reports."""
    argv = flags({name.replace("__", "."): value for name, value in values.items()})
    ended = run_here(command, [*switches, *argv], folder=folder, columns=300)
    assert ended.code == 0, ended.stderr
    return re.findall(r"(\d+) rows in the format (\w+)", ended.stdout)


def steps(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_of_every_format_train_a_supervised_step_and_an_rl_step(tiny_checkpoint, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    files = {name: next((SAMPLES / name).glob("rows.*")) for name in FORMATS}
    shared = {"ds__param_dtype": "fp32", "data__max_len": 768, "data__min_pixels": 12544}

    found = run(
        "train_sft",
        tmp_path,
        "--ckpt.disable_ds",
        model__model_name_or_path=tiny_checkpoint("qwen2_5_vl"),
        # Of LMM-R1's rows those that end with a response.
        data__dataset=",".join(map(str, {**files, "lmm_r1": SAMPLES / "lmm_r1" / "solved.jsonl"}.values())),
        train__batch_size=ROWS,
        train__micro_batch_size=9,
        train__max_epochs=1,
        ckpt__output_dir="sft",
        **shared,
    )
    assert [name for _, name in found] == list(FORMATS)
    (learnt,) = steps(tmp_path / "sft")
    assert learnt["overlong_rows"] == 0

    found = run(
        "train_ppo_ray",
        tmp_path,
        "--train.colocate_all",
        "--ckpt.disable_ds",
        actor__model_name_or_path="sft",
        actor__num_gpus_per_node=1,
        ref__num_gpus_per_node=1,
        data__prompt_dataset=",".join(map(str, files.values())),
        data__prompt_template="{{ content }} Answer shortly.",
        reward__remote_url="reward.py",
        rollout__batch_size=ROWS,
        rollout__n_samples_per_prompt=2,
        rollout__max_new_tokens=8,
        rollout__micro_batch_size=6,
        train__batch_size=2 * ROWS,
        train__micro_batch_size=6,
        algo__kl__init_coef=0,
        algo__advantage__is_correction_level="token",
        logger__rollouts_per_step=2 * ROWS,
        ckpt__output_dir="rl",
        **shared,
    )
    assert [name for _, name in found] == list(FORMATS)
    (step,) = steps(tmp_path / "rl")
    # The engine and the trainer saw the same prompts, prefills and scaled images.
    assert abs(step["vllm_kl"]) < 1e-4
    rollouts = [json.loads(line) for line in (tmp_path / "rl" / "rollouts.jsonl").open()]
    assert len(rollouts) == 2 * ROWS
    begun = [rollout["response"].startswith("<think> Let me count") for rollout in rollouts]
    assert sum(begun) == 4, "two rows of r1_vlm, two samples each"

    found = run(
        "batch_inference",
        tmp_path,
        eval_task="generate",
        model="rl",
        data=files["r1_vlm"],
        system_prompt="Be brief.",
        max_new_tokens=4,
        output="responses.jsonl",
    )
    assert [name for _, name in found] == ["r1_vlm"]
    for line in map(json.loads, (tmp_path / "responses.jsonl").open()):
        assert [turn["role"] for turn in line["prompt"]] == ["system", "user"]
        assert line["prompt"][0]["content"] == "Be brief."
        assert line["responses"][0]["text"].startswith("<think> Let me count")
        assert line["responses"][0]["tokens"] <= 4
