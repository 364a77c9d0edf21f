"""The precision of the weights where `--ds.param_dtype` is left open: bf16, but on a CPU that has no instructions for it."""

import logging
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

CPUINFO = Path("/proc/cpuinfo")
# Of x86 (`flags`) and of ARM (`Features`).
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
# What PyTorch and oneDNN are held to by their variables, where that leaves bf16 instructions out.
LIMITS_BELOW_BF16 = {
    "ATEN_CPU_CAPABILITY": {"default", "avx2"},
    "ONEDNN_MAX_CPU_ISA": {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"},
}
# Of the drivers of NVIDIA, of its Tegra boards, of Windows under WSL, and of AMD.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


def default_param_dtype(*, flag: str, uses_ray: bool = False) -> Literal["bf16", "fp32"]:
    """Return the precision of a run on this machine, and say in one line, on rank 0, where it is fp32.

    Args:
        flag: the name of the flag that was left open.
        uses_ray: whether the run joins the cluster of RAY_ADDRESS, whose processors are others than this one.
    """
    environment = os.environ
    if (uses_ray and environment.get("RAY_ADDRESS")) or has_gpu(environment):
        return "bf16"
    if has_bf16_instructions(_read(CPUINFO), environment):
        return "bf16"
    if environment.get("RANK", "0") == "0":
        logger.warning(
            "--%s fp32: this machine has no GPU, and its processor no bf16 instructions, without which bf16 is many "
            "times slower; give the flag to take another",
            flag,
        )
    return "fp32"


def has_bf16_instructions(cpuinfo: str, environment: Mapping[str, str]) -> bool:
    """Say whether PyTorch can use bf16 instructions of the processor.

    Args:
        cpuinfo: the text of /proc/cpuinfo, empty where there is none.
        environment: whose variables may hold PyTorch and oneDNN to older instructions.
    """
    for name, below in LIMITS_BELOW_BF16.items():
        if environment.get(name, "").lower() in below:
            return False
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((value for name, _, value in lines if name.strip() in ("flags", "Features")), "")
    return not BF16_FLAGS.isdisjoint(flags.split())


def has_gpu(environment: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists) -> bool:
    """Say whether PyTorch can use a GPU here, without loading PyTorch or CUDA.

    Args:
        exists: whether a path exists.
    """
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        if version("torch").endswith("+cpu"):
            return False
    except PackageNotFoundError:
        return False
    return any(exists(device) for device in GPU_DEVICES)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Only Linux has it.
        return ""
