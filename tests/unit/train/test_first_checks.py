"""Faults of a training's input are found before torch and Ray are loaded; a reward function is called once for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers.commands import ANSWERED, QUESTION, ppo, supervised, write_rows

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.train.first_checks import check_first

ROOT = Path(__file__).resolve().parents[3]
RUN = """
import json, sys
from lmm_r1 import cli
for command, argv in json.loads(sys.argv[1]):
    try:
        cli.main([command, *argv])
    except SystemExit as ended:
        print("ended with", ended.code, file=sys.stderr, end="\\0")
print(json.dumps(sorted({"ray", "torch", "transformers"} & set(sys.modules))))
"""
# What is changed of a run that would start, and what is said.
RL: list[tuple[dict[str, object], str]] = [
    ({"data.prompt_dataset": "no.jsonl"}, "no row file no.jsonl; check the path"),
    ({"eval.dataset": "./no", "eval.steps": 1}, "no row file or folder ./no; check the path"),
    ({"data.label_key": "gold"}, 'rows.jsonl line 1: the answer "gold" is missing'),
    ({"reward.remote_url": "typo.py"}, "typo.py, line 2: the reward function raised NameError: name 'labls'"),
    ({"reward.remote_url": "broken.py"}, "broken.py: the file cannot be imported (ZeroDivisionError"),
    (
        {"reward.remote_url": "columns.py"},
        "rows.jsonl line 1: reward_func in --reward.remote_url columns.py asks",
    ),
    ({"reward.remote_url": "mth"}, "--reward mth: unknown verifier"),
    ({"ckpt.output_dir": "done"}, "--ckpt.output_dir done: this stage is finished"),
]
SFT: list[tuple[dict[str, object], str]] = [
    ({"data.dataset": "no.jsonl"}, "no row file no.jsonl; check the path"),
    ({"data.input_key": "turns"}, 'rows.jsonl line 1: no field "turns" (found: messages, answer); name it'),
]


def test_a_fault_is_refused_before_torch_and_ray_are_loaded(tiny_checkpoint, tmp_path):
    model = tiny_checkpoint("llm")
    write_rows(tmp_path, ANSWERED)
    for name, code in {
        "reward.py": "def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n",
        "typo.py": "def reward_func(queries, prompts, labels):\n    return labls\n",
        "broken.py": "1 / 0\n",
        "columns.py": "def reward_func(queries, prompts, labels, level):\n    return [0.0] * len(queries)\n",
        "done/stage.json": "{}",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    cases = [
        (command, make(model, **{name.replace(".", "__"): value for name, value in changes.items()}))
        for command, make, listed in (("train_ppo_ray", ppo, RL), ("train_sft", supervised, SFT))
        for changes, _ in listed
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(cases)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stderr.split("\0")
    assert len(said) == len(cases) + 1, done.stderr
    for (_, expected), lines in zip([*RL, *SFT], said, strict=False):
        assert expected in lines.replace(f"{tmp_path}/", ""), lines
        assert lines.endswith("ended with 1")
    assert json.loads(done.stdout.splitlines()[-1]) == []


def config(folder: Path, model: Path, **changes: object) -> PPOConfig:
    given = {"actor.model_name_or_path": str(model), "data.prompt_dataset": str(folder / "rows.jsonl"), **changes}
    return resolve(dotted.replace(PPOConfig(), {"ckpt.output_dir": str(folder / "out"), **given}))


def test_a_reward_function_is_called_once_on_the_first_row(tiny_checkpoint, tmp_path):
    write_rows(tmp_path, QUESTION)
    (tmp_path / "reward.py").write_text(
        "from pathlib import Path\n"
        "def reward_func(queries, prompts, labels, step):\n"
        "    with Path(__file__).with_name('calls').open('a') as calls:\n"
        "        calls.write(f'{step} {labels[0]};')\n"
        "    return [1.0] * len(queries)\n"
    )
    settings = config(tmp_path, tiny_checkpoint("llm"), **{"reward.remote_url": str(tmp_path / "reward.py")})
    check_first(settings)
    assert (tmp_path / "calls").read_text() == f"1 {QUESTION['answer']};"
