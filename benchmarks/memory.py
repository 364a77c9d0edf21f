"""How much memory of this process a call takes; Linux only."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return by how much the process's memory grows at most while a call runs."""
    forget_peak()
    before = resident_bytes()
    call()
    return resident_peak() - before


def forget_peak() -> None:
    """Set the peak that the system remembers to what is in use now."""
    gc.collect()
    # What the allocator holds back would hide what a call takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    """Return the memory that the process has now."""
    return _status("VmRSS")


def resident_peak() -> int:
    """Return the most that it had since `forget_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
