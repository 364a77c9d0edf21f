"""What the device copies and multiplies at most: the numbers that everything else is held against."""

from __future__ import annotations

from functools import partial

import torch
from gpu_stages.record import Result, Save, Task
from gpu_stages.setting import Setting

COPY_BYTES = 2 * 2**30
# Rows, inner and columns: a large square, a layer of Qwen2.5-VL-3B over 16,384 tokens, and its output layer over a chunk.
PRODUCTS = {"square": (8192, 8192, 8192), "mlp": (16384, 2048, 11008), "output_layer": (256, 2048, 151936)}


def tasks(setting: Setting) -> list[Task]:
    found = [Task(name="copy/on_device", measure=partial(_copied, setting, source="device", target="device"))]
    if setting.device.is_cuda:
        found.append(Task(name="copy/to_device", measure=partial(_copied, setting, source="pinned", target="device")))
        found.append(Task(name="copy/to_host", measure=partial(_copied, setting, source="device", target="pinned")))
    for dtype in (torch.bfloat16, torch.float32):
        for name in PRODUCTS:
            label = str(dtype).removeprefix("torch.")
            found.append(Task(name=f"matmul/{name}/{label}", measure=partial(_multiplied, setting, name, dtype)))
    return found


def _copied(setting: Setting, save: Save, *, source: str, target: str) -> Result:
    device = setting.device
    size = setting.scaled(COPY_BYTES, least=2**20)

    def bytes_at(place: str) -> torch.Tensor:
        if place == "pinned":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.empty(size, dtype=torch.uint8, device=device.place)

    here, there = bytes_at(source), bytes_at(target)
    took = device.median_seconds(lambda: there.copy_(here, non_blocking=True), repeats=setting.repeats)
    # On one device a byte is read and written.
    moved = 2 * size if source == target else size
    return {"bytes": size, "gb_per_s": round(moved / took / 1e9, 2)}


def _multiplied(setting: Setting, name: str, dtype: torch.dtype, save: Save) -> Result:
    device = setting.device
    rows, inner, columns = (setting.scaled(size, least=8) for size in PRODUCTS[name])
    one = torch.randn(rows, inner, dtype=dtype, device=device.place)
    other = torch.randn(inner, columns, dtype=dtype, device=device.place)
    took = device.median_seconds(lambda: one @ other, repeats=setting.repeats)
    rate = 2 * rows * inner * columns / took
    share = None if device.peak is None or dtype != torch.bfloat16 else round(rate / device.peak, 4)
    return {"size": [rows, inner, columns], "tflops": round(rate / 1e12, 3), "of_peak": share}
