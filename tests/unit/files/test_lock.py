"""A lock that keeps a second process out of an output."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmm_r1.errors import UserError
from lmm_r1.files import atomic
from lmm_r1.files.atomic import lock_of, locked

HOLDS = """
import os, sys, time
from pathlib import Path
from lmm_r1.files.atomic import locked
with locked(Path(sys.argv[1]), output="--output rows.jsonl"):
    if os.fork() == 0:
        # A worker that outlives the process.
        time.sleep(60)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_with_the_name_of_the_first_until_that_ends(tmp_path):
    path = tmp_path / "new" / ".rows.jsonl.lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        told = (
            rf"^--output rows.jsonl: process {holder.pid} on {socket.gethostname()} is writing it; wait until it ends"
        )
        with pytest.raises(UserError, match=told), locked(path, output="--output rows.jsonl"):
            pytest.fail("both write")
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        holder.kill()
    try:
        with locked(path, output="--output rows.jsonl"):
            assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        assert not path.exists()
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)
    assert len(children) == 1, "what it started lived on"


def test_an_output_has_one_lock_whatever_its_path_is_written_as(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lock_of(Path("rows.jsonl")) == lock_of(tmp_path / "folder" / ".." / "rows.jsonl")
    assert lock_of(Path("rows.jsonl")) != lock_of(Path("other.jsonl"))


@pytest.mark.parametrize("theirs", ["a link", "open to all", "their own"])
def test_no_lock_is_written_where_another_user_can_write(theirs, tmp_path, monkeypatch):
    """Which could be a link to a file of this user, that would be emptied and deleted."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"lmm-r1-locks-{os.getuid()}"
    (tmp_path / "precious").mkdir()
    if theirs == "a link":
        folder.symlink_to(tmp_path / "precious")
    elif theirs == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(
        UserError, match="another user can write there; set TMPDIR to a folder of your own, or delete it"
    ):
        lock_of(Path("rows.jsonl"))


def test_a_lock_is_in_a_folder_that_no_other_user_can_enter(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with locked(lock_of(Path("rows.jsonl")), output="--output rows.jsonl"):
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert lock_of(Path("other.jsonl")).parent == folder


def test_a_file_system_without_locks_is_written_without_one_and_other_failures_are_not_swallowed(
    tmp_path, monkeypatch
):
    def fails(number: int):
        def lockf(file, how):
            raise OSError(number, os.strerror(number))

        return lockf

    monkeypatch.setattr(atomic.fcntl, "lockf", fails(errno.ENOSYS))
    with locked(tmp_path / "lock", output="--output x"):
        pass
    monkeypatch.setattr(atomic.fcntl, "lockf", fails(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path / "lock", output="--output x"):
        pytest.fail("it is written")
