"""The loops on real parts, one small round each: sampling, training, and the table of what it came to."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers.processes import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.full]

SCRIPTS = Path(__file__).parents[2] / "examples/scripts"
CONFIGS = SCRIPTS / "lmm_r1/configs"


def written(folder: Path, config: str, **changes: object) -> str:
    """A shipped file of settings with some of them changed."""
    file = folder / Path(config).name
    file.write_text(yaml.safe_dump(yaml.safe_load((CONFIGS / config).read_text()) | changes))
    return str(file)


def finished(folder: Path) -> dict:
    return json.loads((folder / "stage.json").read_text())


@pytest.fixture(scope="module")
def variables(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo's model and its rows of text, some of which it gets right; plain transformers start sooner than vLLM."""
    folder = tmp_path_factory.mktemp("loops")
    few = {"max_epochs": 1, "batch_size": 4, "micro_batch_size": 4}
    rl = {
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 24, "micro_batch_size": 8},
        "train": {"colocate_all": True, "batch_size": 8, "micro_batch_size": 8},
        "data": {"max_len": 256, "max_samples": 8},
    }
    return {
        "PYTHON": warm_python(),
        "MODEL": str(demo / "model"),
        "DATA": str(demo / "text"),
        "EVAL_TEXT": str(demo / "text"),
        "N": "8",
        "ROUNDS": "1",
        "SAMPLING": written(folder, "loops/tiny/sampling.yaml", eval_task="generate", max_new_tokens=24),
        "EVAL_CONFIG": written(folder, "demo/evaluate.yaml", backend="transformers", max_new_tokens=24),
        "DPO": written(folder, "loops/tiny/dpo.yaml", train=few),
        "SFT": written(folder, "loops/tiny/sft.yaml", train=few),
        "RM_CONFIG": written(folder, "loops/tiny/rm.yaml", train=few),
        "RL": written(folder, "loops/tiny/rl.yaml", **rl),
    }


@pytest.fixture(scope="module")
def measured_start(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what is measured, with the start's."""
    folder = tmp_path_factory.mktemp("start") / "measured"
    subprocess.run(
        [warm_python(), "-m", "lmm_r1.cli.evaluate", "--config", variables["EVAL_CONFIG"], "--reward", "math"]
        + ["--checkpoints", f"start={variables['MODEL']}", "--files", f"text={variables['DATA']}"]
        + ["--output", str(folder / "start.json")],
        check=True,
    )
    return folder


@pytest.fixture
def loop(variables: dict[str, str], measured_start: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that runs a loop with its settings and flags into a folder, where the start was measured before."""

    def run(script: str, config: str, *flags: str, code: int = 0, **others: str) -> Path:
        output = tmp_path / "loop"
        output.mkdir(exist_ok=True)
        if not (output / "measured").exists():
            shutil.copytree(measured_start, output / "measured")
        environment = os.environ | variables | {"CONFIG": variables[config], "OUTPUT": str(output)} | others
        done = subprocess.run(["bash", str(SCRIPTS / script), *flags], env=environment, timeout=300)
        assert done.returncode == code
        return output

    return run


def compared(output: Path) -> list[tuple[str, str]]:
    record = json.loads((output / "evaluation.json").read_text())
    assert [checkpoint["name"] for checkpoint in record["checkpoints"]][0] == "start"
    for comparison in record["comparisons"]:
        assert comparison["low"] <= comparison["difference"] <= comparison["high"]
    return [(one["baseline"], one["checkpoint"]) for one in record["comparisons"]]


@pytest.mark.parametrize(
    ("script", "config", "kind"),
    [("train_iterative_dpo.sh", "DPO", "dpo"), ("train_rejection_sampling.sh", "SFT", "sft")],
)
def test_a_round_samples_trains_and_is_compared_with_the_start(script, config, kind, loop):
    output = loop(script, config, "--train.max_steps", "2")
    stage = finished(output / "round_1")
    assert stage["kind"] == kind
    assert 1 <= stage["steps"] <= 2
    assert (output / "round_1/model.safetensors").exists()
    assert len((output / "samples/round_1.all.jsonl").read_text().splitlines()) == 16
    assert compared(output) == [("start", "round_1")]


def test_a_reward_model_is_trained_and_rl_goes_on_against_it_after_it_was_stopped(loop):
    # It ends before RL starts, with the reward model behind it.
    output = loop("train_rm.sh", "RL", "--rollout.batch_size", "-1", code=1)
    assert finished(output / "rm")["kind"] == "rm"
    lines = [json.loads(line) for line in (output / "rm/metrics.jsonl").read_text().splitlines()]
    assert any("eval_pair_accuracy" in line for line in lines)
    trained_at = (output / "rm/model.safetensors").stat().st_mtime_ns
    loop("train_rm.sh", "RL")
    assert (output / "rm/model.safetensors").stat().st_mtime_ns == trained_at
    assert finished(output / "rl")["steps"] == 2
    assert compared(output) == [("start", "rl")]
