"""The name of the machine that a benchmark ran on."""

import os
import platform
from pathlib import Path


def machine_name() -> str:
    """Return the number of cores and the processor's model, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {models[0] if models else platform.machine()}"
