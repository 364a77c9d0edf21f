"""A supervised run that evaluates: the loss in its records, and the best checkpoint kept through a restart."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from helpers.commands import flags, write_rows
from helpers.commands_here import start_anew
from helpers.run_folders import check_listed

from lmm_r1.cli import train_sft
from lmm_r1.host.checkpoint_folder import tags
from lmm_r1.supervised import sft

pytestmark = pytest.mark.slow


def rows(folder: Path, name: str, *texts: str) -> Path:
    (folder / name).mkdir()
    return write_rows(folder / name, *({"q": f"{text}?", "a": text, "answer": text} for text in texts))


def train(model: Path, folder: Path, *, monkeypatch: pytest.MonkeyPatch) -> None:
    start_anew(monkeypatch)
    settings = {
        "model.model_name_or_path": model,
        "data.dataset": folder / "train",
        "data.input_key": "q",
        "data.output_key": "a",
        "data.dataloader_num_workers": 1,
        "data.max_len": 64,
        "train.batch_size": 2,
        "train.micro_batch_size": 2,
        "train.max_epochs": 6,
        "adam.lr": 0.01,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": folder / "run",
        "ckpt.save_steps": 1,
        "ckpt.max_num": 1,
        "eval.dataset": folder / "held_out",
        "eval.steps": 2,
    }
    train_sft.main([*flags(settings), "--ds.packing_samples", "--data.apply_chat_template", "--eval.before_training"])


def test_the_best_checkpoint_outlives_others_and_a_restart(
    tiny_checkpoint, tmp_path, own_environment, monkeypatch, capfd
):
    rows(tmp_path, "train", "46", "46")
    rows(tmp_path, "held_out", "46", "46", "46")
    # The disk breaks in the evaluation after the fourth step; the third is saved, and the second is the best.
    encode, calls, here = sft.encode_sample, [], os.getpid()

    def breaking(*row, **given):
        # Training rows are encoded by a worker.
        calls.append(os.getpid())
        if calls.count(here) == 1 + 3 + 3 + 2:
            raise OSError("the disk broke")
        return encode(*row, **given)

    monkeypatch.setattr(sft, "encode_sample", breaking)
    children = set(multiprocessing.active_children())
    with pytest.raises(SystemExit):
        train(tiny_checkpoint("llm"), tmp_path, monkeypatch=monkeypatch)
    assert "step 4/6; step 3 is saved" in capfd.readouterr().err
    assert set(multiprocessing.active_children()) <= children, "and where it breaks off"
    checkpoints = tmp_path / "run" / "checkpoints"
    assert tags(checkpoints) == ["best_global_step2", "global_step3"]
    metric = json.loads((checkpoints / "best_global_step2" / "metric.json").read_text())
    assert metric["metric_key"] == "eval_loss"
    monkeypatch.setattr(sft, "encode_sample", encode)
    train(tiny_checkpoint("llm"), tmp_path, monkeypatch=monkeypatch)
    assert set(multiprocessing.active_children()) <= children, "workers that encode rows end with the training"

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    check_listed(tmp_path / "run")
    evaluated = {line["step"]: line for line in lines if "eval_loss" in line}
    assert list(evaluated) == [0, 2, 4, 6]
    assert [line["step"] for line in lines if "eval_loss" in line].count(0) == 1, "a restart is no start"
    before, *losses = [line["eval_loss"] for line in evaluated.values()]
    assert before > losses[0] == metric["metric_value"] > losses[1] > losses[2]
    assert tags(checkpoints) == ["best_global_step6", "global_step6"]
    # The same three rows as are trained on: their loss without dropout is that of the step after.
    trained = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert (before, losses[0]) == pytest.approx((trained[1], trained[3]), abs=1e-4)
