"""The memory of a machine, and what of it a run takes beside its models' tensors."""

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
# Of a model's process on a GPU: CUDA's context, NCCL's buffers, the workspaces of libraries.
CONTEXT = 900 * MIB
# Of an engine that sleeps on a GPU: the same, and CUDA graphs.
SLEEPING_ENGINE = 1536 * MIB
# Share of a GPU that PyTorch's allocator cannot fill.
LOST_SHARE = 0.04
# Of one of Ray's workers, with its libraries: torch, vLLM, DeepSpeed.
PROCESS = 900 * MIB
# Of the run's own process, and of Ray's.
DRIVER = 1536 * MIB
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of a run's machines; all are taken for equal."""

    gpu_bytes: int | None
    """Memory of each GPU; None where there is none, and models are in the host's memory."""
    host_bytes: int | None
    """None where it is not known, which only a machine with GPUs may leave open."""

    @property
    def usable(self) -> int:
        """What a run's tensors can take of a GPU, or of the host's memory where there is none."""
        if self.gpu_bytes is not None:
            return int(self.gpu_bytes * (1 - LOST_SHARE))
        assert self.host_bytes is not None, "models are in it"
        return self.host_bytes


def machine_of(*, gpu_gib: float | None, host_gib: float | None) -> Machine:
    """Return the machine with so much memory; what is left open is that of this one.

    Args:
        gpu_gib: of each GPU; 0 stands for a machine without. The memory of another machine with GPUs is left unknown.

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
    """Return the memory of this machine's smallest GPU, asked without CUDA, which would take some of it.

    Raises UserError where nobody says it.
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
    """Say whether a run joins a Ray cluster, whose machines are others than this one."""
    return bool(environment.get("RAY_ADDRESS"))
