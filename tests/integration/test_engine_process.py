"""With vLLM's engine in a process of its own, as on GPUs: RL runs, and commands that generate."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import QUESTION, SMALL_RUN, flags, write_rows
from helpers.commands_here import run_here
from helpers.conversations import picture

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# Scored in the actor's process, whose children are the engine's processes: on a CPU its core and one worker.
REWARD = """
import psutil


def reward_func(queries, prompts, labels):
    children = len(psutil.Process().parent().children(recursive=True)) - 1
    return {"rewards": [float(len(query) % 2) for query in queries], "extra_logs": {"children": [children] * len(queries)}}
"""


@pytest.fixture(autouse=True)
def engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Questions, of which every other one has an image."""
    records = []
    for number in range(4):
        image = tmp_path / f"{number}.png"
        picture(56, 56).save(image)
        parts = [{"type": "image", "image": str(image)}] * (number % 2)
        parts.append({"type": "text", "text": f"What is {number} + 1?"})
        records.append({"messages": [{"role": "user", "content": parts}], "answer": "1"})
    return write_rows(tmp_path, *records)


def trained(folder: Path, rows: Path, checkpoint: Path, *switches: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the metrics of two steps of RL, with two prompts each."""
    (folder / "reward.py").write_text(REWARD)
    values = SMALL_RUN | {
        "actor.model_name_or_path": checkpoint,
        "actor.adam.lr": 1e-3,
        "data.prompt_dataset": rows,
        "data.max_len": 256,
        "reward.remote_url": "reward.py",
        "rollout.max_new_tokens": 60,
        "rollout.micro_batch_size": 4,
        "train.micro_batch_size": 4,
        "algo.kl.init_coef": 0,
    }
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    ended = run_here("train_ppo_ray", [*switches, *flags(values | changes)], folder=folder)
    assert ended.code == 0, ended.stderr
    metrics = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["children"] >= 2, "the engine is in the actor's own process"
    return metrics


def test_rl_with_images_trains_on_what_an_engine_process_samples_with_the_weights_that_it_is_sent(
    tiny_checkpoint: Callable[[str], Path], rows: Path, tmp_path: Path
) -> None:
    """With tokens that are guessed ahead, which the engine's process counts."""
    guesses = {"vllm__speculative_tokens": 3, "rollout__temperature": 0.05}
    metrics = trained(tmp_path, rows, tiny_checkpoint("qwen2_5_vl"), "--train.colocate_all", **guesses)
    assert sum(line["rows/image"] for line in metrics) == 1.0, "half of the rows, in whichever step"
    kinds = [(kind, line) for kind in ("text", "image") for line in metrics if f"mismatch/{kind}/max" in line]
    assert {kind for kind, _ in kinds} == {"text", "image"}
    for kind, line in kinds:
        # In the second step with the weights of the first update; log-probs are 20 times those of temperature 1.
        assert 0 < line[f"mismatch/{kind}/max"] < 2e-3
    assert sum(line["rollout/drafted_tokens"] for line in metrics) > 0


# A worker that takes its time to end, as on a busy machine: Python runs this when a process starts.
SLOW_END = """
import importlib.machinery
import sys
import time


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name != "vllm.v1.executor.multiproc_executor":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            end = module.WorkerProc.shutdown
            module.WorkerProc.shutdown = lambda worker: (end(worker), time.sleep(7))

        spec.loader.exec_module = loaded
        return spec


sys.meta_path.insert(0, Finder)
"""


@pytest.mark.full
def test_an_engine_process_whose_worker_ends_late_leaves_no_shared_memory(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path, QUESTION)
    (tmp_path / "sitecustomize.py").write_text(SLOW_END)
    values = {"model": tiny_checkpoint("llm"), "data": rows, "output": "out.jsonl", "max_new_tokens": 2}
    ended = subprocess.run(
        [sys.executable, "-m", "lmm_r1.cli.batch_inference", *flags(values)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert "leaked" not in ended.stderr
