"""The memory of a machine, and what a run takes in addition to its models' tensors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmm_r1 import cpu
from lmm_r1.errors import UserError

GIB = 2**30
MIB = 2**20
# A model's process on a GPU: CUDA's context, NCCL's buffers, workspaces of libraries.
CONTEXT = 900 * MIB
# An engine that sleeps on a GPU: the same, and CUDA graphs.
SLEEPING_ENGINE = 1536 * MIB
# Share of a GPU that PyTorch's allocator cannot fill.
LOST_SHARE = 0.04
# A Ray worker with its libraries: torch, vLLM, DeepSpeed.
PROCESS = 900 * MIB
# The run's own process and Ray's.
DRIVER = 1536 * MIB
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of a run's machines, which are assumed to be equal."""

    gpu_bytes: int | None
    """Memory of each GPU; None without GPUs, when models are in host memory."""
    host_bytes: int | None
    """None if it is not known, which is possible only for a machine with GPUs."""

    @property
    def usable(self) -> int:
        """Bytes of a GPU, or of host memory without GPUs, that a run's tensors can take."""
        if self.gpu_bytes is not None:
            return int(self.gpu_bytes * (1 - LOST_SHARE))
        assert self.host_bytes is not None, "models are in it"
        return self.host_bytes


def machine_of(*, gpu_gib: float | None, host_gib: float | None) -> Machine:
    """Return the machine with this much memory; None takes this machine's.

    Args:
        gpu_gib: of each GPU; 0 is a machine without GPUs. The host memory of another machine with GPUs is unknown.

    Raises:
        UserError: this machine's GPUs do not say how much they have.
    """
    if gpu_gib is None:
        gpu = smallest_gpu_bytes() if cpu.has_cuda() else None
    else:
        gpu = int(gpu_gib * GIB) or None
    if host_gib is not None:
        return Machine(gpu_bytes=gpu, host_bytes=int(host_gib * GIB))
    return Machine(gpu_bytes=gpu, host_bytes=None if gpu_gib else host_bytes())


def smallest_gpu_bytes() -> int:
    """Return the memory of this machine's smallest GPU, without CUDA, which would use some of it.

    Raises UserError if nvidia-smi does not report it.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in said.split()) * MIB
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"the memory of this machine's GPUs is not known, as nvidia-smi gives no answer ({error}); give "
            "--gpu_memory_gib to lmm-r1 plan"
        ) from error


def host_bytes() -> int:
    """Return the memory that processes of this machine, or of this container, may take."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for file in _CGROUP if (limit := _limit(file)) is not None)])


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def on_other_machines(environment: Mapping[str, str]) -> bool:
    """Return whether a run joins a Ray cluster, whose machines may differ from this one."""
    return bool(environment.get("RAY_ADDRESS"))
