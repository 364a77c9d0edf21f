"""A reward model's training as a command: pairs about images are ranked, and what is saved scores as it was trained."""

import json

import pytest
from helpers.commands import flags, write_pairs
from helpers.commands_here import start_anew
from helpers.run_folders import check_listed

from lmm_r1.cli import train_rm
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import read_pairs
from lmm_r1.records.run_folder import read_stage
from lmm_r1.scoring.reward_model import RewardModel

pytestmark = pytest.mark.slow


def test_eight_pairs_about_images_are_ranked_and_the_saved_model_serves(
    tiny_checkpoint, tmp_path, own_environment, monkeypatch
):
    start_anew(monkeypatch)
    pairs = write_pairs(tmp_path)
    run = tmp_path / "run"
    values = {
        "model.model_name_or_path": tiny_checkpoint("qwen2_5_vl"),
        "data.dataset": pairs,
        "data.max_len": 128,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "train.max_epochs": 30,
        "adam.lr": 0.005,
        "ds.param_dtype": "fp32",
        "ds.value_head_prefix": "value_head",
        "eval.dataset": pairs,
        "eval.steps": 30,
        "ckpt.output_dir": run,
    }
    train_rm.main([*flags(values), "--eval.before_training"])

    check_listed(run)
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    trained = {line["step"]: line for line in lines if "loss" in line}
    evaluated = {line["step"]: line for line in lines if "eval_loss" in line}
    assert list(evaluated) == [0, 30]
    assert evaluated[0]["eval_loss"] == pytest.approx(trained[1]["loss"], rel=1e-4)
    assert (trained[30]["pair_accuracy"], evaluated[30]["eval_pair_accuracy"]) == (1.0, 1.0)
    assert trained[30]["loss"] < 0.1
    assert evaluated[30]["eval_calibration_error"] < 0.1
    assert (read_stage(run).kind, read_stage(run).steps) == ("rm", 30)

    def served(normalize: bool) -> list[float]:
        model = RewardModel(
            str(run),
            dtype="fp32",
            max_len=128,
            max_batch_tokens=None,
            value_head_prefix="score",
            normalize=normalize,
            trust_remote_code=False,
        )
        samples = [
            model.encode(Row(messages=row.messages, answer="", datasource="", location=row.location), text)
            for row in read_pairs(str(pairs)).rows.values()
            for text in (row.chosen[0].parts[0].text, row.rejected[0].parts[0].text)
        ]
        return model.score(samples)

    rewards = served(normalize=False)
    margins = [chosen - rejected for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)]
    assert sum(margins) / 8 == pytest.approx(evaluated[30]["eval_reward_margin"], rel=1e-4)
    assert sum(rewards) / 16 == pytest.approx(evaluated[30]["eval_reward_mean"], rel=1e-4)
    assert sum(served(normalize=True)) / 16 == pytest.approx(0.0, abs=1e-4)
