"""A supervised run with every installed tracker, stopped and resumed with a step to repeat."""

import importlib.util
import json
from pathlib import Path

import pytest
from helpers.commands import ANSWERED, flags, write_rows
from helpers.commands_here import start_anew
from helpers.tracked_runs import keep_offline, of_tensorboard, of_wandb

from lmm_r1.cli import train_sft
from lmm_r1.records.tracker_backends import OPENERS
from lmm_r1.supervised import sft

pytestmark = pytest.mark.slow

TRACKERS = [name for name in OPENERS if importlib.util.find_spec(name)]
STEPS = 4


def train(model: Path, folder: Path, *, monkeypatch: pytest.MonkeyPatch) -> None:
    start_anew(monkeypatch)
    settings = {
        "model.model_name_or_path": model,
        "data.dataset": folder / "rows.jsonl",
        "data.bad_rows": "skip",
        "train.batch_size": 2,
        "train.micro_batch_size": 2,
        "train.max_epochs": STEPS,
        "ds.param_dtype": "fp32",
        "ckpt.output_dir": folder / "run",
        "ckpt.save_steps": 2,
    }
    monkeypatch.setenv("WANDB_MODE", "offline")
    train_sft.main([*flags(settings), "--logger.trackers", *TRACKERS])


def test_a_stopped_run_goes_on_in_every_tracker(tiny_checkpoint, tmp_path, own_environment, monkeypatch, capfd):
    keep_offline(tmp_path / "home", monkeypatch)
    write_rows(tmp_path, ANSWERED, "{]", ANSWERED)
    encode = sft.encode_sample
    # The disk breaks in the fourth step; the last checkpoint is that of the second.
    encoded = iter(range(1 + 2 * 3))
    monkeypatch.setattr(sft, "encode_sample", lambda *row, **given: next(encoded) + 1 and encode(*row, **given))
    with pytest.raises(SystemExit):
        train(tiny_checkpoint("llm"), tmp_path, monkeypatch=monkeypatch)
    assert "step 3/4; step 2 is saved" in capfd.readouterr().err
    monkeypatch.setattr(sft, "encode_sample", encode)
    train(tiny_checkpoint("llm"), tmp_path, monkeypatch=monkeypatch)
    run = tmp_path / "run"
    left_out = [json.loads(line) for line in (run / "left_out_rows.jsonl").read_text().splitlines()]
    assert [(row["index"], row["reason"].split(": ")[:2]) for row in left_out] == [
        (1, [f"{tmp_path}/rows.jsonl line 2", "not valid JSON"])
    ]
    told = " ".join(capfd.readouterr().out.split())
    assert told.count("; 1 row that cannot be used is left out, the first: ") == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4], "step 3 was made again"
    logged = [(line["step"], pytest.approx(line["loss"], abs=1e-4)) for line in lines]
    (events,) = (run / "tensorboard").iterdir()
    assert logged == of_tensorboard(events)["train/loss"]
    if "wandb" in TRACKERS:
        assert {row["_step"]: pytest.approx(row["train/loss"], abs=1e-4) for row in of_wandb(run)} == {
            line["step"]: line["loss"] for line in lines
        }
