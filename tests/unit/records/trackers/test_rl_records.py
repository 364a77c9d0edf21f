"""What the RL trainer hands to its trackers, and that OpenRLHF makes none of its own."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.conversations import message, picture, row
from helpers.rl_steps import small_run
from helpers.samples import generated_sample
from helpers.tracked_runs import of_tensorboard, texts_of_tensorboard
from rich.console import Console

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.config.rewards import WeightedPart
from lmm_r1.data.sample import Sample
from lmm_r1.records.rollouts import read_rollouts
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.tracker_backends import open_trackers
from lmm_r1.rl.filtering import dropped_group
from lmm_r1.rl.records import Recorder
from lmm_r1.rl.rollouts import Rollout
from lmm_r1.rl.run import workers_strategy

ROW = row(message("user", picture(8, 6), "What is 1+1?"), answer="2")


def sample(response: str, *, reward: float, score: float | None = None) -> Sample:
    return generated_sample(of=ROW, text=response, reward=reward, score=score, parts={"accuracy": reward})


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    """Trackers asked for as on a command line of OpenRLHF, of which wandb is left offline."""
    return small_run(
        prompts=1,
        train__num_episodes=3,
        logger__tensorboard_dir=str(tmp_path / "tb"),
        logger__logging_steps=2,
        logger__wandb__run_name="tried",
        ckpt__output_dir=str(tmp_path / "run"),
    )


@pytest.mark.parametrize(
    ("reward", "kept", "warned"),
    [
        *[("math", 1, True), ("math", 2, False), ("http://a/get_reward", 0, True)],
        *[("math:format_weight=0", 0, False), ("reward.py", 0, False)],
    ],
)
def test_a_first_step_without_the_paid_format_is_warned_of(config, caplog, tmp_path, reward, kept, warned):
    folder = RunFolder(path=tmp_path / "run", name="rl", kind="rl")
    folder.open("")
    given = dotted.replace(config, {"reward.remote_url": reward})
    recorder = Recorder(config=given, folder=folder, total_steps=2, console=Console(quiet=True))
    # Of 40 responses, 2 are 5 %.
    parts = [{"format": float(number < kept)} for number in range(40)]
    group = [generated_sample(of=ROW, text="2", reward=0.0, parts=one) for one in parts]
    rollout = Rollout(samples=[SimpleNamespace(logged={})] * 40, groups=[group], overlong=0)
    for step in (1, 2):
        recorder.step(step, {"response_length": 1.0, "timing/step_total": 1.0}, rollout)
    said = [record.getMessage() for record in caplog.records if record.name == "lmm_r1.rl.records"]
    assert len(said) == warned
    assert all(one.startswith(f"{kept / 40:.1%}".replace("%", " %")) and "system_prompt think" in one for one in said)


def test_metrics_and_rollouts_of_a_step_reach_the_trackers(config, tmp_path):
    folder = RunFolder(path=tmp_path / "run", name="rl", kind="rl")
    folder.open("")
    with open_trackers(config, folder=folder.path, resumed=False) as trackers:
        recorder = Recorder(
            config=config, folder=folder, trackers=trackers, total_steps=3, console=Console(soft_wrap=True)
        )
        group = [sample("2", reward=1.0), sample("<b>", reward=0.0)]
        weights = (WeightedPart(name="accuracy", factors=("accuracy",), weight=0.25),)
        apart = [dropped_group([sample("3", reward=3.0)] * 2, "std", recorded=True)]
        apart.append(dropped_group([sample("4", reward=4.0)] * 2, "range", recorded=False))
        rollout = Rollout(
            samples=[SimpleNamespace(logged={})] * 2,
            groups=[group],
            overlong=0,
            dropped=tuple(apart),
            part_weights=weights,
        )
        status = {"response_length": 2.0, "timing/step_total": 0.5}
        for step in (1, 2, 3):
            recorder.step(step, status | {"policy_loss": step / 4}, rollout)
        recorder.evaluation(3, [[sample("2", reward=1.0, score=score) for score in (1.0, 0.0)]])
    shown = of_tensorboard(tmp_path / "tb/tried")
    # Every second step, as --logger.logging_steps says, and the last one.
    assert shown["train/policy_loss"] == [(2, 0.5), (3, 0.75)]
    assert shown["train/reward"] == shown["train/accuracy"] == [(2, 0.5), (3, 0.5)]
    assert shown["train/part_weight/accuracy"] == [(2, 0.25), (3, 0.25)]
    assert shown["eval/eval_test_pass1"] == [(3, 0.5)]
    *_, first, second = texts_of_tensorboard(tmp_path / "tb/tried", "train/generated_samples/text_summary")[3].split(
        "\n"
    )
    assert first == "| 3 | 0 | user: &lt;image&gt;What is 1+1? | 2 | 2 | 1 | False | 1 |"
    assert second == "| 3 | 1 | user: &lt;image&gt;What is 1+1? | &lt;b&gt; | 2 | 0 | False | 0 |"
    kept = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kept] == [1, 2, 3, 3]
    assert {name: kept[0][name] for name in kept[0] if name.startswith("filtered_groups")} == {
        "filtered_groups": 2,
        "filtered_groups/std": 1,
        "filtered_groups/range": 1,
    }
    rollouts = read_rollouts(folder.path / "rollouts.jsonl")
    first = rollouts.read(index for index, step in enumerate(rollouts.steps) if step == 1)
    # Dropped ones stand behind those that are learnt from, in groups of their own, and no tracker has them.
    assert [(one.group, one.reward, one.dropped) for one in first] == [
        (0, 1.0, None),
        (0, 0.0, None),
        (1, 3.0, "std"),
        (1, 3.0, "std"),
    ]


def test_the_workers_get_no_key(config):
    strategy = workers_strategy(dotted.replace(config, {"logger.wandb.key": "hush"}))
    assert "hush" not in repr((strategy.args, strategy.config))
    assert strategy.config.logger.tensorboard_dir is None
