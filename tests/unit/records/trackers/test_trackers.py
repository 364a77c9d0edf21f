"""Trackers that fail, and settings with which none is started."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
from helpers.commands import error_of
from helpers.tracked_runs import of_tensorboard

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.data.sample import Cut
from lmm_r1.errors import UserError
from lmm_r1.records.rollouts import RecordedPart, RecordedTurn, SampledResponse
from lmm_r1.records.tracker_backends import BACKENDS, check_trackers, open_trackers
from lmm_r1.records.trackers import Generation, make_generation, shown_images, table


def config(**changes: object) -> SFTConfig:
    given = {"logger.wandb.run_name": "tried"} | {name.replace("__", "."): value for name, value in changes.items()}
    return dotted.replace(SFTConfig(), given)


def sample(**changes: object) -> Generation:
    fields = {"prompt": "?", "response": "2", "label": "2", "reward": 1.0, "scores": {}, "truncated": False}
    return Generation(**fields | changes)


def test_a_tracker_that_fails_is_told_of_once_and_tried_again(tmp_path, caplog):
    gone = (sample(images=(tmp_path / "gone.png",)),)
    with caplog.at_level(logging.WARNING):
        with open_trackers(config(logger__trackers=("tensorboard",)), folder=tmp_path, resumed=False) as trackers:
            for step in (1, 2, 3, 4, 5, 6, 7, 8):
                trackers.log(step, {"loss": step})
                if step in (1, 3):
                    trackers.log_generations(step, gone)
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("--logger.trackers tensorboard: step 1 could not be logged (FileNotFoundError")
    assert first.endswith("training goes on, metrics.jsonl has every step")
    # The rollouts of steps 1 and 3, and the metrics of steps 2 and 4, in which the tracker rests.
    assert last == "--logger.trackers tensorboard: 4 logs were left out; metrics.jsonl has every step"
    shown = of_tensorboard(tmp_path / "tensorboard/tried")["train/loss"]
    assert shown == [(1, 1.0), (3, 3.0), (5, 5.0), (6, 6.0), (7, 7.0), (8, 8.0)]
    assert json.loads((tmp_path / "trackers.json").read_text())["tensorboard"]["last_steps"]["train"] == 8


def test_a_tracker_that_goes_on_failing_rests_longer_each_time(tmp_path, caplog):
    gone = (sample(images=(tmp_path / "gone.png",)),)
    tried = []
    trackers = open_trackers(config(logger__trackers=("tensorboard",)), folder=tmp_path, resumed=False)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 32):
            before = trackers._failures_in_a_row["tensorboard"]
            trackers.log_generations(step, gone)
            tried += [step] if trackers._failures_in_a_row["tensorboard"] > before else []
        trackers.close(failed=False)
    assert tried == [1, 3, 7, 15, 31]
    assert len(caplog.records) == 2


def test_a_tracker_that_is_not_installed_is_told_with_what_to_install(monkeypatch):
    missing = dataclasses.replace(BACKENDS["trackio"], library="no_such_library")
    monkeypatch.setitem(BACKENDS, "trackio", missing)
    with pytest.raises(UserError) as refused:
        check_trackers(config(logger__trackers=("trackio",)).logger)
    assert str(refused.value) == (
        "--logger.trackers trackio: no_such_library is not installed; pip install 'trackio>=0.40', or leave it out"
    )


@pytest.fixture
def any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tracker's library counts as installed, so that what is asked next shows."""
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(backend, library="json"))


@pytest.mark.usefixtures("any_library")
def test_wandb_needs_a_key_unless_it_is_offline(offline, monkeypatch):
    with pytest.raises(UserError, match=r"no API key for api.wandb.ai; give --logger.wandb.key, set WANDB_API_KEY"):
        check_trackers(config(logger__trackers=("wandb",)).logger)
    check_trackers(config(logger__trackers=("wandb",), logger__wandb__key="k").logger)
    check_trackers(config(logger__trackers=("wandb",), logger__wandb__mode="offline").logger)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(config(logger__trackers=("wandb",)).logger)
    monkeypatch.delenv("WANDB_MODE")
    (offline / "netrc").write_text("machine api.wandb.ai login user password k\n")
    check_trackers(config(logger__trackers=("wandb",)).logger)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(UserError, match="no API key for wandb.example.org"):
        check_trackers(config(logger__trackers=("wandb",)).logger)


@pytest.mark.usefixtures("any_library")
def test_trackio_needs_a_login_for_a_space_alone(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    check_trackers(config(logger__trackers=("trackio",)).logger)
    flags = {"logger__trackers": ("trackio",), "logger__trackio__space_id": "us/runs"}
    with pytest.raises(UserError, match="^--logger.trackio.space_id us/runs: nobody is logged in"):
        check_trackers(config(**flags).logger)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_token")
    check_trackers(config(**flags).logger)


@pytest.mark.parametrize("command", ["train_sft", "train_ppo_ray"])
def test_a_command_says_so_before_it_starts(command, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {
        "train_sft": ["--model.model_name_or_path", "m", "--data.dataset", "rows.jsonl"],
        "train_ppo_ray": [
            *("--actor.model_name_or_path", "m", "--data.prompt_dataset", "rows.jsonl", "--reward.remote_url", "r.py"),
            *("--rollout.n_samples_per_prompt", "2"),
        ],
    }
    sentence = error_of(command, [*flags[command], "--logger.trackers", "tensorboard", "wandb"], capfd=capfd)
    assert sentence.startswith("--logger.trackers wandb: there is no API key")
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_cannot_start_stops_the_run_with_its_reason(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(UserError, match=r"--logger.trackers tensorboard: cannot start \(.*tensorboard.*leave it out"):
        open_trackers(config(logger__trackers=("tensorboard",)), folder=tmp_path, resumed=False)


def test_a_damaged_record_is_told_with_what_to_do(tmp_path):
    (tmp_path / "trackers.json").write_text('{"tensorboard": ')
    with pytest.raises(UserError, match=r"trackers.json: cannot be read \(.*; remove it"):
        open_trackers(config(logger__trackers=("tensorboard",)), folder=tmp_path, resumed=True)


def test_a_rollout_becomes_a_row_of_the_table():
    image = {"type": "image", "image": "images/a.png"}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Think."}]},
        {"role": "user", "content": [image, {"type": "text", "text": "What?"}, {"type": "video", "video": "a.mp4"}]},
    ]
    response = SampledResponse(
        step=1,
        group=0,
        response="a\ud83d",
        label="2",
        reward=1,
        scores={"accuracy": 1.0},
        response_tokens=1,
        truncated=0,
    )
    assert make_generation(response, messages=messages, folder=Path("run")) == Generation(
        prompt="system: Think.\n\nuser: <image>What?<video>",
        response="a?",
        label="2",
        reward=1.0,
        scores={"accuracy": 1.0},
        truncated=False,
        images=(Path("run/images/a.png"),),
    )


def test_an_episode_becomes_a_row_with_all_its_turns_and_the_boxes_of_its_pictures():
    cut = Cut(picture=0, name="original_image", box=(100, 60, 200, 120), size=(400, 300))
    seen = RecordedTurn(
        role="user",
        parts=(RecordedPart(kind="text", value="See "), RecordedPart(kind="image", value="images/b.png", cut=cut)),
    )
    response = SampledResponse(
        step=1,
        group=0,
        response="2",
        label="2",
        reward=1.0,
        scores={"turns": 2.0},
        response_tokens=4,
        truncated=False,
        said=(
            RecordedTurn(role="assistant", parts=(RecordedPart(kind="text", value="crop"),)),
            seen,
            RecordedTurn(role="assistant", parts=()),
        ),
        end="images",
    )
    messages = [{"role": "user", "content": [{"type": "image", "image": "images/a.png"}]}]
    made = make_generation(response, messages=messages, folder=Path("run"))
    assert made.response == "assistant: crop\n\nuser: See <image>\n\nassistant: "
    columns, (row,) = table(1, [made])
    assert dict(zip(columns, row, strict=True))["ended"] == "out of pictures"
    first, second = shown_images([made])
    assert (first.path, first.caption, first.boxes) == (Path("run/images/a.png"), "sample 0", [(0.25, 0.2, 0.5, 0.4)])
    assert (second.path, second.caption, second.boxes) == (Path("run/images/b.png"), "sample 0, turn 2", [])
    assert "ended" not in table(1, [sample()])[0]
