"""The examples of docs/extending.md and docs/loggers.md work, each from a file outside the package."""

import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers.commands import flags, write_rows
from helpers.commands_here import start_anew

from lmm_r1 import cli
from lmm_r1.cluster import KIT_VARIABLE
from lmm_r1.rl.advantages import RewardedRollout, estimator_named
from lmm_r1.rl.losses import LossSettings, PolicyPass, loss_named

ROOT = Path(__file__).resolve().parents[2]
HEADER = re.compile(r"# ([\w/.]+\.py)")


def examples(page: str) -> dict[str, str]:
    """The blocks of Python of a page whose first line names a file, by that name."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    codes = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return {header[1]: code for code in codes if (header := HEADER.match(code))}


USERS = examples("extending.md") | examples("loggers.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with all files."""
    for name, code in USERS.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


SETTINGS = {
    "data.max_len": 512,
    "train.batch_size": 2,
    "train.micro_batch_size": 1,
    "train.max_epochs": 1,
    "ds.param_dtype": "fp32",
    "ckpt.output_dir": "run",
}


def steps_of(run: str) -> list[dict[str, float]]:
    return list(map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines()))


def test_the_trainer_takes_two_steps(tiny_checkpoint, folder, own_environment, monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": n}]} for n in "1234"
    ]
    write_rows(folder, *rows)
    start_anew(monkeypatch)
    given = {"model.model_name_or_path": tiny_checkpoint("llm"), "data.dataset": "rows.jsonl", **SETTINGS}
    monkeypatch.setattr(sys, "argv", ["train_focal.py", *flags(given)])
    runpy.run_path("train_focal.py")["main"]()
    steps = steps_of("run")
    assert [step["step"] for step in steps] == [1, 2]
    # A focal loss weighs -log p by 1 - p.
    assert all(0 < step["loss"] < step["nll_loss"] for step in steps)


def test_the_kit_trains_two_steps_on_images_with_the_tracker(folder, own_environment, monkeypatch):
    monkeypatch.setenv(KIT_VARIABLE, "")
    cli.main(["--kit", "own_vl.py", "make_tiny_model", "--arch", "own_vl", "--output", "tiny"])
    cli.main(["make_task", "digits", "--modality", "image", "--rows", "4", "--solutions", "--output", "rows"])
    start_anew(monkeypatch)
    given = {"model.model_name_or_path": "tiny", "data.dataset": "rows", "logger.trackers": "log_file.py?name=a.txt"}
    cli.main(["--kit", "own_vl.py", "train_sft", *flags(given | SETTINGS)])
    assert json.loads(Path("run/config.json").read_text())["model_type"] == "own_vl"
    steps = steps_of("run")
    assert all(step["grad_norm"] > 0 for step in steps)
    first, second = Path("run/a.txt").read_text().splitlines()
    assert first.startswith(f"1 {{'train/loss': {steps[0]['loss']}, ")
    assert second.startswith(f"2 {{'train/loss': {steps[1]['loss']}, ")


def test_the_task_makes_rows_whose_solutions_earn_the_full_reward_of_its_rule(folder):
    made = {}
    for split in ("train", "test"):
        given = ["--rows", "20", "--split", split, "--output", split, "--solutions"]
        cli.main(["make_task", "multiples.py?most=5", *given])
        made[split] = [json.loads(line) for line in Path(split, "rows.jsonl").read_text().splitlines()]
    assert {row["answer"] for row in made["train"]}.isdisjoint(row["answer"] for row in made["test"])
    assert {row["answer"].split()[0] for row in made["train"]} == set("2345")
    reward_func = runpy.run_path("multiples.py")["reward_func"]
    solved = [row["messages"][-1]["content"] for row in made["train"]]
    labels = [row["answer"] for row in made["train"]]
    assert reward_func([f"q{text}" for text in solved], ["q"] * 20, labels)["rewards"] == [1.5] * 20
    answers = ["15", "12", "10", "16", "fifteen"]
    queries = [f"q<think>so</think><answer>{answer}</answer>" for answer in answers]
    assert reward_func(queries, ["q"] * 5, ["5 10"] * 5)["scores"] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_verifier_is_a_reward_of_its_own_file(folder):
    reward_func = runpy.run_path("contains_verifier.py")["reward_func"]
    queries = ["q<think>so</think><answer>the Cat</answer>", "q<think>so</think><answer>a dog</answer>"]
    reply = reward_func(queries, ["q", "q"], ["cat", "cat"])
    assert (reply["rewards"], reply["scores"]) == ([1.5, 0.5], [1.0, 0.0])


def test_the_estimator_and_the_loss_have_their_values_by_hand(folder):
    mask = torch.tensor([[1, 0], [1, 1], [0, 1]])
    rewards = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.double)
    rollout = RewardedRollout(
        rewards=rewards, mask=mask, kl=torch.zeros(3, 2), kl_coef=0.0, gamma=1.0, lambd=1.0, divide=False
    )
    # Minus the mean of 0.5, divided by the range of 1 and the least of 1.
    advantages = estimator_named("group_range.py?least=1")(rollout).advantages
    assert (advantages * mask).tolist() == [[0.25, 0.0], [-0.25, -0.25], [0.0, 0.0]]
    given = PolicyPass(
        log_probs=torch.full((1, 3), math.log(0.6)),
        old_log_probs=torch.tensor([[math.log(0.1), math.log(0.3), 0.0]]),
        reference_log_probs=torch.tensor([[math.log(0.6), math.log(0.15), 0.0]]),
        entropy=torch.tensor([[1.0, 3.0, 0.0]]),
        advantages=torch.tensor([[2.0, -1.0, 0.0]]),
        mask=torch.tensor([[1, 1, 0]]),
    )
    loss, costly = loss_named("anchored_loss.py?anchor=0.5&bonus=0.25")
    # Ratios of 6 and 2, and log-ratios to the reference of 0 and the logarithm of 4.
    expected = [-12 + 0 - 0.25, 2 + 0.25 * math.log(4) ** 2 - 0.75, 0.0]
    assert loss(given, LossSettings()).losses.tolist() == [pytest.approx(expected)]
    assert costly == {"entropy", "reference_log_probs"}
