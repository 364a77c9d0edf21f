"""Whether a stage without stage.json still runs: the process that trains in its folder, and its signs of life."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import Count, checked, read_json_object, write_json_object
from lmm_r1.records.metrics import METRICS_FILE

SESSION_FILE = "session.json"
BEAT_S = 15.0
"""Seconds between two signs of life, each of which sets the file's modification time."""
SILENT_S = 120.0
"""A process on another host counts as ended after this long without a sign of life."""
_LOOK_S = 1.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingSession:
    """A process that trains in a run folder, or has trained there."""

    name: str
    kind: str
    host: str
    pid: Count
    born: str
    """When the process began, in the kernel's units; process ids are reused."""
    first_started_at: float
    """When the first session of the stage began, in seconds since the epoch."""
    ended_at: float | None = None
    """When it ended without finishing the stage, if it could still write that."""
    last_sign_at: float
    """Its last sign of life; all times are seconds since the epoch."""

    def runs(self) -> bool:
        """Return whether it still runs."""
        if self.ended_at is not None:
            return False
        if self.host == socket.gethostname():
            return born(self.pid) == self.born
        return time.time() - self.last_sign_at <= SILENT_S


def read_session(folder: Path) -> TrainingSession | None:
    """Return the last session in a run folder, None if there is no record; raises UserError for a malformed one."""
    path = folder / SESSION_FILE
    try:
        record, beat = read_json_object(path), path.stat().st_mtime
    except FileNotFoundError:
        # It may just have finished.
        return None
    metrics = folder / METRICS_FILE
    # A step is a sign, too, for file systems that do not update times.
    sign = record.get("ended_at") or max(beat, metrics.stat().st_mtime if metrics.exists() else 0.0)
    return checked(TrainingSession, record | {"last_sign_at": sign}, place=str(path))


def running_elsewhere(folder: Path) -> TrainingSession | None:
    """Return the session of another host that trains in a folder, None if there is none.

    A killed process gives no more signs of life, so this waits for the next one, or until `SILENT_S` has passed.
    """
    session = read_session(folder)
    if session is None or session.host == socket.gethostname() or not session.runs():
        return None
    logger.warning(
        "%s: waiting up to %.0f s for a sign of life of process %d on %s, which trained here",
        folder,
        SILENT_S,
        session.pid,
        session.host,
    )
    while True:
        time.sleep(_LOOK_S)
        later = read_session(folder)
        if later is None or not later.runs():
            return None
        if later.last_sign_at > session.last_sign_at:
            return later


@contextmanager
def kept_session(folder: Path, *, name: str, kind: str, finished: Path) -> Iterator[float]:
    """Record this process as the one that trains in a folder while the block runs, with signs of life.

    Yields when the first session of the stage began. Afterwards the file is deleted if the stage is finished, and
    else records that the session has ended. A killed process writes nothing, so its signs of life stop.

    Args:
        name, kind: those of the stage.
        finished: a file that only a finished stage has.
    """
    earlier = read_session(folder)
    began = time.time() if earlier is None else earlier.first_started_at
    record: dict[str, object] = {
        "name": name,
        "kind": kind,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "born": born(os.getpid()),
        "first_started_at": round(began, 3),
    }
    path = folder / SESSION_FILE
    write_json_object(path, record)
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(path, over), name="signs of life", daemon=True)
    beating.start()
    try:
        yield began
    finally:
        over.set()
        beating.join()
        if finished.exists():
            path.unlink(missing_ok=True)
        elif path.exists():
            # The error that ended the block, perhaps a full disk, must reach the user instead of this one.
            with suppress(UserError):
                write_json_object(path, record | {"ended_at": round(time.time(), 3)})


def born(pid: int) -> str:
    """Return when a process began, in the kernel's units; empty if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # After the name, which may contain anything: the state, then 18 numbers, then the start.
    state, *numbers = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else numbers[18]


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        try:
            os.utime(path)
        except OSError:
            # The folder is gone, or its file system does not update times.
            return
