"""Forty rows of five other projects train two supervised and two RL steps; no flag names their formats or columns."""

import base64
import json
import re
from pathlib import Path

import datasets
import pytest
from helpers.commands import flags
from helpers.commands_here import run_here

PICTURE = Path(__file__).resolve().parents[2] / "datasets" / "samples" / "flat" / "images" / "three.png"
EACH = 8
REWARD = """
def paid(completions, solution=None, **kwargs):
    assert all(message["role"] == "assistant" for (message,) in completions)
    return [float(len(completion[0]["content"]) % 2) for completion in completions]
"""

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def rows_of(folder: Path) -> dict[str, Path]:
    """Write eight rows of each project and return their files, by the format that is found."""
    picture, data = PICTURE.read_bytes(), base64.b64encode(PICTURE.read_bytes()).decode()
    asked = [f"How many dots are there, and {number} more?" for number in range(EACH)]
    user = [[{"role": "user", "content": text}] for text in asked]
    answers = [str(3 + number) for number in range(EACH)]
    stored = {"bytes": picture, "path": None}
    rows = {
        "verl": [
            {
                "data_source": "dots",
                "prompt": [{"role": "user", "content": f"<image>{text}"}],
                "images": [stored],
                "ability": "count",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"index": answer},
            }
            for text, answer in zip(asked, answers, strict=True)
        ],
        "trl": [
            {"prompt": turns, "image": stored, "solution": f"<answer>{answer}</answer>"}
            for turns, answer in zip(user, answers, strict=True)
        ],
    }
    feature = {"verl": ("images", datasets.Sequence(datasets.Image())), "trl": ("image", datasets.Image())}
    files = {}
    for name, records in rows.items():
        files[name] = folder / f"{name}.parquet"
        datasets.Dataset.from_list(records).cast_column(*feature[name]).to_parquet(files[name])
    lines = {
        "flat": [
            {"image": data, "question": text, "answer": answer} for text, answer in zip(asked, answers, strict=True)
        ],
        "swift": [
            {"messages": turns, "images": [data], "solution": answer}
            for turns, answer in zip(user, answers, strict=True)
        ],
        "unsloth": [
            {
                "question": text,
                "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}],
                "image": data,
                "answer": answer,
            }
            for text, answer in zip(asked, answers, strict=True)
        ],
    }
    for name, records in lines.items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(record) + "\n" for record in records))
    return files


def run(command: str, folder: Path, *switches: str, **values: object) -> list[str]:
    argv = flags({name.replace("__", "."): value for name, value in values.items()})
    ended = run_here(command, [*switches, *argv], folder=folder, columns=300)
    assert ended.code == 0, ended.stderr
    return re.findall(r"(\d+) rows in the format (\w+)", ended.stdout)


def steps(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_of_five_projects_train_two_supervised_and_two_rl_steps(tiny_checkpoint, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    files = rows_of(tmp_path)
    expected = [(str(EACH), name) for name in ("verl", "flat", "flat", "lmm_r1", "flat")]
    shared = {"ds__param_dtype": "fp32", "data__max_len": 768}

    found = run(
        "train_sft",
        tmp_path,
        "--ckpt.disable_ds",
        model__model_name_or_path=tiny_checkpoint("qwen2_5_vl"),
        data__dataset=",".join(map(str, files.values())),
        train__batch_size=20,
        train__micro_batch_size=5,
        train__max_epochs=1,
        ckpt__output_dir="sft",
        **shared,
    )
    assert found == expected
    trained = steps(tmp_path / "sft")
    assert len(trained) == 2
    assert all(step["overlong_rows"] == 0 for step in trained)

    found = run(
        "train_ppo_ray",
        tmp_path,
        "--train.colocate_all",
        "--ckpt.disable_ds",
        actor__model_name_or_path="sft",
        actor__num_gpus_per_node=1,
        ref__num_gpus_per_node=1,
        data__prompt_dataset=",".join(map(str, files.values())),
        reward="reward.py",
        rollout__batch_size=20,
        rollout__n_samples_per_prompt=2,
        rollout__max_new_tokens=8,
        rollout__micro_batch_size=10,
        train__batch_size=40,
        train__micro_batch_size=10,
        algo__kl__init_coef=0,
        logger__rollouts_per_step=40,
        ckpt__output_dir="rl",
        **shared,
    )
    assert found == expected
    assert len(steps(tmp_path / "rl")) == 2
    rollouts = [json.loads(line) for line in (tmp_path / "rl" / "rollouts.jsonl").open()]
    assert len(rollouts) == 80
    assert {rollout["label"] for rollout in rollouts} == {str(3 + number) for number in range(EACH)}
    assert all(rollout["reward"] == len(rollout["response"]) % 2 for rollout in rollouts)
