"""Every tracking service, with its real library and offline: what is logged can be read back, and a resume goes on."""

import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.tracked_runs import of_tensorboard, of_wandb, texts_of_tensorboard

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.records.tracker_backends import open_trackers
from lmm_r1.records.trackers import Generation, Trackers


def installed(library: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed; it is in the extra `loggers`")


def opened(name: str, folder: Path, *, resumed: bool) -> Trackers:
    flags = {
        "logger.trackers": (name,),
        "logger.wandb.key": "0" * 40,
        "logger.wandb.run_name": "tried",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        return open_trackers(dotted.replace(SFTConfig(), flags), folder=folder, resumed=resumed)


def samples(step: int) -> Sequence[Generation]:
    """Two samples, of which one's answer could pass for markup."""
    shared = {"label": "2", "truncated": False}
    return (
        Generation(prompt="user: 1+1?", response="<b>2|3</b>", reward=0.5, scores={"accuracy": 0.0}, **shared),
        Generation(
            prompt="user: <image>?",
            response=f"{step}\nand",
            reward=1.5,
            scores={"accuracy": 1.0, "format": 0.5},
            **shared,
        ),
    )


COLUMNS = ["step", "sample", "prompt", "response", "label", "reward", "truncated", "accuracy", "format"]


def rows(step: int) -> list[list[object]]:
    """The table of `samples`."""
    return [
        [step, 0, "user: 1+1?", "<b>2|3</b>", "2", 0.5, False, 0.0, None],
        [step, 1, "user: <image>?", f"{step}\nand", "2", 1.5, False, 1.0, 0.5],
    ]


def log_stop_and_resume(name: str, folder: Path) -> None:
    """Log steps 1 and 2 with losses 0.1 and 0.2, then, taken up at step 1, steps 2 and 3 with losses 2 and 3."""
    for steps, scale, resumed in (((1, 2), 0.1, False), ((2, 3), 1.0, True)):
        with opened(name, folder, resumed=resumed) as trackers:
            for step in steps:
                trackers.log(step, {"loss": step * scale, "text": "not a number"})
                trackers.log_generations(step, samples(step))
                trackers.log_eval(step, {"eval_math_pass1": step * scale})
        # wandb names a session's folder after the second.
        time.sleep(1.0 if name == "wandb" and not resumed else 0.0)


def test_tensorboard_shows_every_step_once_with_what_was_logged_last(tmp_path):
    log_stop_and_resume("tensorboard", tmp_path)
    folder = tmp_path / "tensorboard/tried"
    assert of_tensorboard(folder) == {
        "train/loss": [(1, 0.1), (2, 2.0), (3, 3.0)],
        "eval/eval_math_pass1": [(1, 0.1), (2, 2.0), (3, 3.0)],
        "train/generated_samples/text_summary": [(1, 1), (2, 1), (3, 1)],
    }
    assert texts_of_tensorboard(folder, "train/generated_samples/text_summary")[2].splitlines() == [
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        "| 2 | 0 | user: 1+1? | &lt;b&gt;2&#124;3&lt;/b&gt; | 2 | 0.5 | False | 0 |  |",
        "| 2 | 1 | user: &lt;image&gt;? | 2<br>and | 2 | 1.5 | False | 1 | 0.5 |",
    ]


def test_tensorboard_goes_on_in_the_folder_it_began_in_unless_the_run_starts_anew(tmp_path):
    for resumed, name in ((False, "monday"), (True, "tuesday"), (False, "wednesday")):
        flags = {"logger.trackers": ("tensorboard",), "logger.tensorboard_dir": str(tmp_path / "tb")}
        flags |= {"logger.wandb.run_name": name}
        with open_trackers(dotted.replace(SFTConfig(), flags), folder=tmp_path, resumed=resumed) as trackers:
            trackers.log(1 + resumed, {"loss": 0.5})
    assert {path.name for path in (tmp_path / "tb").iterdir()} == {"monday", "wednesday"}
    assert of_tensorboard(tmp_path / "tb/monday") == {"train/loss": [(1, 0.5), (2, 0.5)]}


@installed("wandb")
def test_wandb_has_the_steps_of_both_sessions_in_one_run(tmp_path):
    log_stop_and_resume("wandb", tmp_path)
    found = of_wandb(tmp_path)
    assert [(row["_step"], row["train/loss"]) for row in found] == [
        (1, 0.1),
        (2, 0.2),
        (2, 2.0),
        (3, 3.0),
    ]
    assert [(row["train/global_step"], row["eval/global_step"]) for row in found] == [(n, n) for n in (1, 2, 2, 3)]
    assert [row["eval/eval_math_pass1"] for row in found] == [0.1, 0.2, 2.0, 3.0]
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]["identity"]
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert first.name.endswith(identity)
    assert second.name.endswith(identity)
    for folder, row in zip((first, first, second, second), found, strict=True):
        shown = json.loads((folder / "files" / row["train/generated_samples/path"]).read_text())
        assert shown == {"columns": COLUMNS, "data": rows(row["_step"])}


@installed("wandb")
def test_wandb_is_told_team_project_group_and_name(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    told: dict[str, object] = {}
    run = SimpleNamespace(id="1", define_metric=lambda *names, **given: None, finish=lambda **given: None)
    monkeypatch.setattr("wandb.init", lambda **given: told.update(given) or run)
    shared = {"logger.trackers": ("wandb",), "logger.wandb.project": "ours", "logger.wandb.group": "both"}
    for flags in ({"org": "us", "run_name": "first"}, {"key": "hush"}):
        given = shared | {f"logger.wandb.{name}": value for name, value in flags.items()}
        open_trackers(dotted.replace(SFTConfig(), given), folder=tmp_path, resumed=False).close(failed=False)
        if "org" in flags:
            wanted = {"entity": "us", "group": "both", "name": "first", "settings": None}
            assert wanted.items() <= told.items()
    assert (told["project"], told["settings"].api_key) == ("ours", "hush")


@installed("wandb")
def test_wandb_is_given_no_key_to_keep(tmp_path, offline):
    log_stop_and_resume("wandb", tmp_path)
    kept = [path for folder in (tmp_path, offline) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in kept if b"0" * 40 in path.read_bytes()] == []
