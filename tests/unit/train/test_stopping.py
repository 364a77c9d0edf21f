"""Ctrl-C and SIGTERM end a run where its weights are those of a whole step, and a failure is told in sentences."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmm_r1.cli import user_errors
from lmm_r1.errors import RunStopped, UserError
from lmm_r1.train import stopping
from lmm_r1.train.stopping import Progress, SaveSchedule, StopRequests, reported_ends

SIGNALS = [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)]


@pytest.fixture(autouse=True)
def in_the_foreground() -> Iterator[None]:
    """Ctrl-C is ignored in what a shell runs in the background, this process perhaps."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def progress(**changes: object) -> Progress:
    fields = {"name": "fre", "step": 7, "total": 10, "saved": 5, "checkpoints": Path("run/checkpoints")}
    return Progress(**{**fields, "disabled": False, "overwrite": False} | changes)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    # The handler runs between two instructions of the main thread.
    for _ in range(1000):
        time.sleep(0)


@pytest.mark.parametrize(("number", "reason", "code"), SIGNALS)
def test_a_request_ends_the_run_at_once_and_says_how_to_go_on(number, reason, code, tmp_path):
    before = signal.getsignal(number)
    stops = StopRequests()
    stops.progress = progress
    with pytest.raises(RunStopped) as stopped, stops, reported_ends(stops, folder=tmp_path):
        send(number)
    assert str(stopped.value) == (
        f"{reason}: fre stopped at step 7/10; step 5 is saved in run/checkpoints, the same command goes on from there"
    )
    assert stopped.value.exit_code == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "reason", "code"), SIGNALS)
def test_a_request_is_held_up_until_the_step_is_whole(number, reason, code, capfd):
    done = []
    with StopRequests() as stops:
        with stops.held():
            assert not stops.asked
            send(number)
            assert stops.asked
            done.append("the step")
        with pytest.raises(KeyboardInterrupt):
            stops.check()
        assert (stops.reason, stops.exit_code) == (reason, code)
    assert done == ["the step"]
    assert capfd.readouterr().err == f"{reason}: after this step; once more ends it at once\n"


def test_another_request_ends_it_at_once_but_not_one_that_comes_with_the_first(monkeypatch):
    with StopRequests() as stops, stops.held():
        send(signal.SIGINT)
        send(signal.SIGTERM)
        monkeypatch.setattr(stopping, "_ONE_REQUEST_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        assert stops.reason == "Ctrl-C"


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "step 5 is saved in run/checkpoints, the same command goes on from there"),
        ({"overwrite": True}, "the same command without --ckpt.overwrite goes on from there"),
        ({"saved": None}, "nothing is saved yet, the same command starts anew"),
        ({"disabled": True}, "nothing is saved (--ckpt.disable_ds), the same command starts anew"),
    ],
)
def test_what_is_saved_is_told(changes, end):
    assert progress(**changes).describe().endswith(end)


def test_a_failure_leaves_its_traceback_in_the_run_folder(tmp_path):
    stops = StopRequests()
    stops.progress = progress
    with pytest.raises(UserError) as ended, reported_ends(stops, folder=tmp_path):
        raise RuntimeError("out of memory\nand a stack dump\n")
    sentence = str(ended.value)
    assert sentence.startswith(
        f"RuntimeError: out of memory (the whole traceback is in {tmp_path / 'error.txt'}). fre"
    )
    assert "stack dump" not in sentence
    assert "and a stack dump" in (tmp_path / "error.txt").read_text()


def test_a_full_disk_is_told_with_its_file_and_how_to_go_on_and_leaves_no_traceback(tmp_path, capsys):
    stops = StopRequests()
    stops.progress = progress
    with pytest.raises(UserError) as ended, reported_ends(stops, folder=tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/metrics.jsonl")
    assert str(ended.value) == (
        "run/metrics.jsonl: cannot be written (No space left on device); free space on its disk, or choose another place. "
        + progress().describe()
    )
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_a_command_ends_with_the_sentence_and_the_code(capsys):
    with pytest.raises(SystemExit) as ended, user_errors("lmm-r1 train_sft"):
        raise RunStopped("SIGTERM: stopped", exit_code=143)
    assert ended.value.code == 143
    assert capsys.readouterr().err == "lmm-r1 train_sft: SIGTERM: stopped\n"


def test_steps_are_saved_by_number_and_by_time(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    schedule = SaveSchedule(steps=4, minutes=2, saved_at=now)
    assert [step for step in range(1, 9) if schedule.is_due(step)] == [4, 8]
    now += 119.9
    assert not schedule.is_due(5)
    now += 0.2
    assert schedule.is_due(5)
    schedule.note_saved()
    assert not schedule.is_due(6)
    now += 1e9
    assert not SaveSchedule(steps=-1, minutes=0, saved_at=0.0).is_due(6)
