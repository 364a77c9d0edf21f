"""Whether a stage runs, was stopped or is finished, as readers of its folder see it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from lmm_r1.errors import UserError
from lmm_r1.records import session
from lmm_r1.records.run_folder import RunFolder, Stage, read_run
from lmm_r1.records.session import SESSION_FILE, SILENT_S, born, read_session

TRAINS = """
import sys, time
from pathlib import Path
from lmm_r1.records.run_folder import RunFolder
folder = RunFolder(path=Path(sys.argv[1]), name="fre", kind="rl")
with folder.locked(), folder.session():
    folder.open("")
    folder.metrics(1, {"reward": 0.5})
    print("trains", flush=True)
    time.sleep(60)
"""


def stage_of(folder: Path) -> Stage:
    (stage,) = read_run(folder).stages
    return stage


def training(folder: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", TRAINS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "trains\n"
    return process


def changed(folder: Path, **values: object) -> None:
    path = folder / SESSION_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def opened(path: Path) -> RunFolder:
    folder = RunFolder(path=path, name="fre", kind="rl")
    folder.open("")
    return folder


def test_a_process_that_is_killed_has_stopped_at_once_and_one_that_goes_on_runs(tmp_path):
    process = training(tmp_path)
    stage = stage_of(tmp_path)
    assert (stage.state, stage.name, stage.kind, stage.steps) == ("running", "fre", "rl", 1)
    process.send_signal(signal.SIGSTOP)
    assert stage_of(tmp_path).state == "running", "it can go on"
    process.kill()
    # Nobody has buried it yet.
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        time.sleep(0.01)
    assert stage_of(tmp_path).state == "stopped"
    process.wait()
    stopped = stage_of(tmp_path)
    assert (stopped.state, stopped.steps, stopped.finished_at) == ("stopped", 1, None)
    assert abs(stopped.last_sign_at.timestamp() - time.time()) < 30
    # The same command goes on.
    again = training(tmp_path)
    assert stage_of(tmp_path).state == "running"
    assert stage_of(tmp_path).started_at == stage.started_at, "the stage began with its first session"
    again.kill()
    again.wait()
    assert stage_of(tmp_path).state == "stopped"


def test_a_process_with_the_number_of_one_that_ended_is_another(tmp_path):
    folder = opened(tmp_path)
    with folder.session():
        folder.metrics(1, {"reward": 0.5})
        assert read_session(tmp_path).pid == os.getpid()
        assert stage_of(tmp_path).state == "running"
        changed(tmp_path, born="1")
        assert stage_of(tmp_path).state == "stopped"


def test_on_another_machine_its_signs_of_life_tell(tmp_path):
    with opened(tmp_path).session():
        changed(tmp_path, host="another")
        now = time.time()
        for silent, state in ((0, "running"), (SILENT_S - 5, "running"), (SILENT_S + 5, "stopped")):
            os.utime(tmp_path / SESSION_FILE, (now - silent, now - silent))
            assert stage_of(tmp_path).state == state
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0}\n')
        assert stage_of(tmp_path).state == "running", "a step is a sign, too"


def test_signs_of_life_come_until_the_session_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "BEAT_S", 0.01)
    path = tmp_path / SESSION_FILE
    with opened(tmp_path).session():
        for _ in range(2):
            os.utime(path, (1, 1))
            until = time.monotonic() + 20
            while path.stat().st_mtime < 2:
                assert time.monotonic() < until
                time.sleep(0.005)
    os.utime(path, (1, 1))
    time.sleep(0.1)
    assert path.stat().st_mtime == 1


def test_a_session_that_fails_says_so_though_its_process_goes_on(tmp_path):
    folder = opened(tmp_path)
    with contextlib.suppress(ZeroDivisionError), folder.session():
        folder.metrics(1, {"reward": 0.5})
        _ = 1 / 0
    stage = stage_of(tmp_path)
    assert stage.state == "stopped"
    assert abs(stage.last_sign_at.timestamp() - time.time()) < 30
    assert born(os.getpid()) == read_session(tmp_path).born


def test_a_finished_stage_keeps_no_session_and_began_with_its_first(tmp_path):
    with pytest.raises(KeyboardInterrupt), opened(tmp_path).session():
        raise KeyboardInterrupt
    changed(tmp_path, first_started_at=1_000_000.0)
    folder = opened(tmp_path)
    with folder.session():
        folder.started -= 100
        folder.finish(steps=7)
        assert stage_of(tmp_path).state == "finished", "while the session ends"
    assert not (tmp_path / SESSION_FILE).exists()
    stage = stage_of(tmp_path)
    assert (stage.state, stage.last_sign_at) == ("finished", None)
    assert stage.started_at == datetime.fromtimestamp(1_000_000, tz=timezone.utc)
    assert stage.seconds == pytest.approx(100, abs=5), "the break between the sessions is no training"


def test_what_ended_a_session_is_told_though_nothing_can_be_written_any_more(tmp_path, monkeypatch):
    folder = opened(tmp_path)

    def full(*_: object) -> None:
        raise UserError("no space left")

    def fails() -> None:
        with folder.session():
            monkeypatch.setattr(session, "write_json_object", full)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()


def test_a_second_training_in_a_folder_is_refused_while_the_first_one_lives(tmp_path):
    process = training(tmp_path)
    told = (
        rf"^--ckpt.output_dir {tmp_path}: process {process.pid} on {socket.gethostname()} is writing it; "
        "wait until it ends, or choose another place$"
    )
    second = RunFolder(path=tmp_path, name="fre", kind="rl")
    with pytest.raises(UserError, match=told), second.locked():
        pytest.fail("it trains")
    process.kill()
    process.wait()
    with second.locked():
        pass
    # Not even the process that held it before keeps it.
    with second.locked():
        pass


def test_a_training_on_another_host_is_refused_at_its_next_sign_of_life(tmp_path, monkeypatch, caplog):
    folder = opened(tmp_path)
    with folder.session():
        changed(tmp_path, host="other", pid=7)
        long_ago = time.time() - 60
        os.utime(tmp_path / SESSION_FILE, (long_ago, long_ago))
        monkeypatch.setattr(session.time, "sleep", lambda seconds: os.utime(tmp_path / SESSION_FILE))
        told = f"^--ckpt.output_dir {tmp_path}: process 7 on other is training in it"
        with pytest.raises(UserError, match=told), folder.locked():
            pytest.fail("it trains")
        assert "waiting up to 120 s for a sign of life of process 7 on other" in caplog.text


def test_a_training_on_another_host_that_was_killed_is_waited_for_and_then_taken_up(tmp_path, monkeypatch):
    folder = opened(tmp_path)
    with folder.session():
        changed(tmp_path, host="other", pid=7)
        ages = iter([60, 90, 119, 121])

        def pass_time(seconds: float) -> None:
            then = time.time() - next(ages)
            os.utime(tmp_path / SESSION_FILE, (then, then))

        pass_time(0)
        # The clock goes on and the signs do not.
        first = read_session(tmp_path).last_sign_at
        clock = iter([first + 60, first + 90, first + 119, first + 121])
        monkeypatch.setattr(session.time, "time", lambda: next(clock))
        monkeypatch.setattr(session.time, "sleep", lambda seconds: None)
        with folder.locked():
            pass
        assert list(clock) == [], "it waited until the signs had failed for 120 s"
        monkeypatch.undo()
