"""Where a call's time on the device goes, by PyTorch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gpu_stages.record import Result
from gpu_stages.setting import Device
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# The first that is found in a kernel's name: attention kernels and matrix products also name copies within them, and
# copies are element-wise kernels.
GROUPS = {
    "attention": re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE),
    "matmul": re.compile(r"gemm|gemv|cutlass|cublas|nvjet|wgmma|xmma|splitk|convolution|aten::\w*mm\b", re.IGNORECASE),
    "communication": re.compile(r"nccl", re.IGNORECASE),
    "copy": re.compile(r"memcpy|memset|copy|index|gather|scatter|aten::cat|aten::fill_", re.IGNORECASE),
    "norm/elementwise": re.compile(r"elementwise|vectorized|reduce|norm|softmax|triton|aten::", re.IGNORECASE),
}
TOP = 15
NAME_LENGTH = 160


def group_of(kernel: str) -> str:
    """Return what kind of work a kernel does, by its name."""
    return next((group for group, pattern in GROUPS.items() if pattern.search(kernel)), "other")


def kernel_shares(call: Callable[[], Any], device: Device) -> Result:
    """Return the kernels that take most of a call's time on the device, and the share of each kind of work."""
    activity = ProfilerActivity.CUDA if device.is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call()
        device.wait()
    times: dict[str, float] = {}
    counts: dict[str, int] = {}
    for event in profiler.key_averages():
        if device.is_cuda != (event.device_type == DeviceType.CUDA):
            continue
        took = event.self_device_time_total if device.is_cuda else event.self_cpu_time_total
        times[event.key] = times.get(event.key, 0.0) + took
        counts[event.key] = counts.get(event.key, 0) + event.count
    return shares(times, counts)


def shares(times: Mapping[str, float], counts: Mapping[str, int]) -> Result:
    """Return shares of the time of all kernels, by kernel and by kind.

    Args:
        times: microseconds by kernel.
        counts: how often each was started.
    """
    total = sum(times.values())
    groups = dict.fromkeys((*GROUPS, "other"), 0.0)
    for name, took in times.items():
        groups[group_of(name)] += took
    largest = sorted(times, key=times.__getitem__, reverse=True)[:TOP]
    return {
        "busy_s": round(total / 1e6, 4),
        "started": sum(counts.values()),
        "by_group": {name: round(took / total, 4) if total else 0.0 for name, took in groups.items()},
        "top": [
            {
                "kernel": name[:NAME_LENGTH],
                "group": group_of(name),
                "share": round(times[name] / total, 4) if total else 0.0,
                "started": counts[name],
            }
            for name in largest
        ],
    }
