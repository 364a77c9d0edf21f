"""Trackers that fail, and settings with which none is started."""

import importlib.util
import logging
from pathlib import Path

import pytest

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.config import SFTConfig, resolve
from lmm_r1.errors import UserError
from lmm_r1.records.rollouts import RecordedPart, RecordedTurn, SampledResponse
from lmm_r1.records.tracker_backends import check_trackers, open_trackers
from lmm_r1.records.trackers import Generation, Tracker, Trackers, make_generation, table


def config(**changes: object) -> SFTConfig:
    given = {"logger.wandb.run_name": "tried"} | {name.replace("__", "."): value for name, value in changes.items()}
    return dotted.replace(SFTConfig(), given)


def sample(**changes: object) -> Generation:
    fields = {"prompt": "?", "response": "2", "label": "2", "reward": 1.0, "scores": {}, "truncated": False}
    return Generation(**fields | changes)


def test_a_tracker_that_fails_is_reported_once_and_tried_again(caplog):
    logged: list[int] = []

    def fail(step: int, samples: object) -> None:
        raise FileNotFoundError("gone")

    with caplog.at_level(logging.WARNING):
        with Trackers(
            {"own": Tracker(log=lambda step, values: logged.append(step), log_generations=fail)}
        ) as trackers:
            for step in (1, 2, 3):
                trackers.log(step, {"loss": step})
                trackers.log_generations(step, [sample()])
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("--logger.trackers own: step 1 could not be logged (FileNotFoundError")
    assert first.endswith("training goes on, metrics.jsonl has every step")
    assert last == "--logger.trackers own: 3 logs failed; metrics.jsonl has every step"
    assert logged == [1, 2, 3]


def test_a_tracker_that_is_not_installed_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="^--logger.trackers wandb: wandb is not installed; pip install wandb, or leav"
    ):
        check_trackers(config(logger__trackers=("wandb",)).logger)


OWN = """
from lmm_r1.records.trackers import Tracker

def tracker(session, *, name):
    file = session.folder.joinpath(name).open("a", buffering=1)
    return Tracker(log=lambda step, values: print(session.earlier, step, values["train/loss"], file=file))

def failing(session):
    return Tracker(log=lambda step, values: values["none"])

def wrong(session):
    return session.nothing

def other(session):
    return 1
"""


def test_a_tracker_of_a_file_gets_steps_and_one_that_fails_is_told_of_with_its_line(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    given = ["--logger.trackers", "tensorboard", "own.py?name=a.txt", "own.py:failing"]
    Path("c.yaml").write_text(f"logger.trackers: {given[1:]}")
    flags, by_file = (parse(SFTConfig, argv, prog="p", description="d") for argv in (given, ["--config", "c.yaml"]))
    assert flags == by_file
    flags = resolve(dotted.replace(flags, {"model.model_name_or_path": "m", "data.dataset": "rows.jsonl"}))
    assert flags.logger.trackers == tuple(given[1:])
    for resumed in (False, True):
        with open_trackers(flags, folder=tmp_path, resumed=resumed) as trackers:
            for step in (1, 2):
                trackers.log(step + resumed, {"loss": 0.5})
                trackers.log_generations(step + resumed, (sample(),))
    assert Path("a.txt").read_text() == "None 1 0.5\nNone 2 0.5\n 2 0.5\n 3 0.5\n"
    told = "own.py:failing: step 1 could not be logged (KeyError: 'none', at own.py, line 9); training goes on"
    assert told in caplog.text.replace(f"{tmp_path}/", "")
    for name, said in (
        ("gone", r"own\.py:gone: the file defines no gone; add it"),
        ("wrong", r"cannot start \(.*own\.py:wrong: it raised AttributeError: .*, at .*own\.py, line 12\)"),
        ("other", r"own\.py:other: cannot start \(return a Tracker, not int\)"),
    ):
        with pytest.raises(UserError, match=said):
            open_trackers(config(logger__trackers=(f"own.py:{name}",)), folder=tmp_path, resumed=False)


def test_a_tracker_that_cannot_start_stops_the_run_with_its_reason(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(UserError, match=r"--logger.trackers tensorboard: cannot start \(.*tensorboard.*leave it out"):
        open_trackers(config(logger__trackers=("tensorboard",)), folder=tmp_path, resumed=False)


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
    assert make_generation(response, messages=messages) == Generation(
        prompt="system: Think.\n\nuser: <image>What?<video>",
        response="a?",
        label="2",
        reward=1.0,
        scores={"accuracy": 1.0},
        truncated=False,
    )


def test_an_episode_becomes_a_row_with_all_its_turns():
    seen = RecordedTurn(
        role="user", parts=(RecordedPart(kind="text", value="See "), RecordedPart(kind="image", value="images/b.png"))
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
    made = make_generation(response, messages=messages)
    assert made.response == "assistant: crop\n\nuser: See <image>\n\nassistant: "
    columns, (row,) = table(1, [made])
    assert dict(zip(columns, row, strict=True))["ended"] == "out of pictures"
    assert "ended" not in table(1, [sample()])[0]
