"""The commands of docs/quickstart.md, one after the other, with fewer steps and shorter responses than the page's."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.commands_here import run_here
from helpers.processes import warm_python
from helpers.tables import commands_of

pytestmark = [pytest.mark.slow, pytest.mark.full]

# What is added to a command, to save time.
SMALL = {
    "train_sft": ["--train.max_steps", "2"],
    "train_ppo_ray": ["--train.num_episodes", "1", "--rollout.max_new_tokens", "8"],
    "evaluate": ["--max_rows", "4", "--max_new_tokens", "8"],
    "interactive_chat": ["--max_new_tokens", "8", "--backend", "transformers"],
}


def test_the_project_of_the_quickstart_trains_measures_and_chats(tmp_path):
    folder, said = tmp_path, {}
    for command in commands_of("docs/quickstart.md")[0]:
        if command[0] == "cd":
            folder = folder / command[1]
            continue
        name = command[1]
        arguments = [*command[2:], *SMALL.get(name, [])]
        if name == "interactive_chat":
            said[name] = chat(arguments, folder=folder)
            continue
        ended = run_here(name, arguments, folder=folder)
        assert ended.code == 0, ended.stderr
        said[name] = ended.stdout
    assert "sizes for 40 rows: --train.batch_size 8 an update" in said["train_sft"]
    assert "the worked answers of 40 are not part of the prompts" in said["train_ppo_ray"]
    assert "the worked answers of 40" not in said["train_sft"]
    assert "sizes for 40 prompts: --rollout.batch_size 8 x --rollout.n_samples_per_prompt 8" in said["train_ppo_ray"]
    metrics = [json.loads(line) for line in (folder / "runs/rl/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    scores = json.loads((folder / "runs/evaluation/sft_rl_on_train_test.json").read_text())
    assert [checkpoint["name"] for checkpoint in scores["checkpoints"]] == ["sft", "rl"]
    assert said["interactive_chat"].strip()


def chat(arguments: list[str], *, folder: Path) -> str:
    """What the model answers to a line from a pipe."""
    done = subprocess.run(
        [warm_python(), "-m", "lmm_r1.cli.interactive_chat", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input="Sort 8.\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
