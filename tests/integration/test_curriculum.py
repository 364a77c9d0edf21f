"""The whole chain on real parts: cold start, text RL, image RL, evaluation, report; and a killed stage that goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.processes import warm_python

from lmm_r1.cli import make_task

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "examples/scripts/lmm_r1"
DEMO = SCRIPTS / "configs/demo"
STEPS = 2
PROMPTS = 4


def small(config: str, folder: Path, **changes: object) -> Path:
    """A demo config with a few steps only."""
    settings = yaml.safe_load((DEMO / config).read_text()) | changes
    file = folder / config
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint, tmp_path_factory) -> dict[str, str]:
    """A tiny model, rows, and configs: what run_curriculum.sh takes from its environment."""
    folder = tmp_path_factory.mktemp("curriculum")
    sets = {
        "sft": ("mixed", "train", 32, "--solutions"),
        "text": ("text", "train", PROMPTS * STEPS),
        "image": ("image", "train", PROMPTS * STEPS),
        "text_test": ("text", "test", 4),
        "image_test": ("image", "test", 4),
    }
    for name, (modality, split, rows, *more) in sets.items():
        flags = ("--modality", modality, "--split", split, "--rows", rows, *more, "--output", folder / name)
        make_task.main(["digits", *map(str, flags)])
    rl = {
        "rollout": {
            "batch_size": PROMPTS,
            "n_samples_per_prompt": 4,
            "max_new_tokens": 12,
            "micro_batch_size": 8,
        },
        "train": {"colocate_all": True, "batch_size": 16, "micro_batch_size": 8},
        "data": {"max_len": 160},
        "ckpt": {"save_steps": 1, "max_num": 1},
        "logger": {"rollouts_per_step": 4 * PROMPTS},
    }
    guessing = {"num_engines": 1, "enforce_eager": True, "enable_prefix_caching": True, "speculative_tokens": 3}
    sft = {"train": {"max_steps": STEPS, "batch_size": 8, "micro_batch_size": 4, "max_epochs": 10}}
    return {
        "MODEL": str(tiny_checkpoint("qwen2_5_vl")),
        "ROOT": str(folder / "run"),
        "SFT_DATA": str(folder / "sft"),
        "FRE_DATA": str(folder / "text"),
        "MGT_DATA": str(folder / "image"),
        "EVAL_TEXT": str(folder / "text_test"),
        "EVAL_IMAGE": str(folder / "image_test"),
        "SFT_CONFIG": str(small("cold_start.yaml", folder, **sft)),
        "FRE_CONFIG": str(small("fre.yaml", folder, **rl)),
        "MGT_CONFIG": str(small("mgt.yaml", folder, **rl, vllm=guessing)),
        "EVAL_CONFIG": str(DEMO / "evaluate.yaml"),
        "PYTHON": sys.executable,
        "NUM_GPUS": "",
    }


def start(inputs: dict[str, str], **others: str) -> subprocess.Popen:
    script, environment = str(SCRIPTS / "run_curriculum.sh"), os.environ | inputs | others
    return subprocess.Popen(["bash", script], env=environment, cwd=REPOSITORY)


def steps_in(stage: Path) -> list[int]:
    file = stage / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def metrics_of(stage: Path) -> list[dict]:
    """The metrics of a stage's last two steps."""
    return [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()][-STEPS:]


def check_groups(stage: Path) -> None:
    """The eight prompts are each used once, kill or not."""
    lines = (stage / "rollouts.jsonl").read_text().splitlines()
    groups = {(line["step"], line["group"]): line["messages"] for line in map(json.loads, lines)}
    assert sorted(step for step, _ in groups) == [1] * PROMPTS + [2] * PROMPTS
    assert len({json.dumps(messages) for messages in groups.values()}) == PROMPTS * STEPS


def test_two_stages_of_two_steps_survive_a_kill_and_leave_a_report(inputs):
    root = Path(inputs["ROOT"])
    first = start(inputs)
    saved = root / "fre/checkpoints/_actor/latest"
    deadline = time.time() + 900
    while not saved.exists():
        assert first.poll() is None, "the curriculum ended before its first RL step"
        assert time.time() < deadline, "no RL step was saved in time"
        time.sleep(0.05)
    # The driver of the stage, as `kill -9` would hit it: no handler of its own can run.
    drivers = subprocess.run(
        ["pgrep", "-f", f"lmm_r1.cli.train_ppo_ray.*{root}/fre"], capture_output=True, text=True, check=True
    )
    for pid in drivers.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    assert first.wait(timeout=300) != 0
    assert not (root / "fre/stage.json").exists()
    assert start(inputs, PYTHON=warm_python()).wait(timeout=1200) == 0
    for stage in ("cold_start", "fre", "mgt"):
        record = json.loads((root / stage / "stage.json").read_text())
        assert record["steps"] == STEPS
        assert steps_in(root / stage)[-1] == STEPS
    resumed = steps_in(root / "fre")
    assert resumed.count(1) == 1, f"step 1 was saved, so it must not be done again: {resumed}"
    for stage in ("fre", "mgt"):
        check_groups(root / stage)
    first, second = metrics_of(root / "mgt")
    assert first["rollout/drafted_tokens"] >= first["rollout/accepted_tokens"] >= 0
    assert first["mismatch/mean"] < 1e-3, "guessed tokens have the log-probs of the policy"
    rollouts = [json.loads(line) for line in (root / "mgt/rollouts.jsonl").read_text().splitlines()]
    images = [
        part["image"] for rollout in rollouts for part in rollout["messages"][0]["content"] if part["type"] == "image"
    ]
    assert images
    assert all((root / "mgt" / image).is_file() for image in images)
    summary = json.loads((root / "summary.json").read_text())
    assert [stage["name"] for stage in summary["stages"]] == ["cold_start", "fre", "mgt"]
    assert all(0 <= stage["text_accuracy"] <= 1 and 0 <= stage["image_accuracy"] <= 1 for stage in summary["stages"])
    assert (root / "report.html").stat().st_size > 10_000
