"""What all stages get: the device, how much is measured on it, and what they make only once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from memory import peak_bytes

from lmm_r1.errors import UserError

# Dense bf16 operations per second, by what the device's name holds.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
GIB = 2**30
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or the CPU with its kernels where only the check itself is tried out."""

    place: torch.device
    name: str
    peak: float | None
    """Dense bf16 operations per second; None where they are not known."""

    @classmethod
    def of(cls, kind: str, *, peak_tflops: float | None = None) -> Device:
        """Return the device of this process; raises UserError if there is no such device."""
        place = torch.device(kind)
        if place.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device {kind}: PyTorch {torch.__version__} finds no GPU here; give --device cpu")
        if place.type == "cuda" and place.index is None:
            # Some of PyTorch's functions take no device without a number.
            place = torch.device("cuda", torch.cuda.current_device())
        name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
        peak = peak_tflops * 1e12 if peak_tflops else next((PEAKS[part] for part in PEAKS if part in name), None)
        return cls(place=place, name=name, peak=peak)

    @property
    def is_cuda(self) -> bool:
        return self.place.type == "cuda"

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.place)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return how long a call and all that it starts on the device takes."""
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def median_seconds(self, call: Callable[[], Any], *, repeats: int) -> float:
        """Return the median over `repeats` calls, after one that chooses kernels."""
        call()
        return statistics.median(self.seconds(call) for _ in range(repeats))

    def held_bytes(self) -> int:
        """Return what tensors take now; 0 on a CPU, whose peaks are counted from there."""
        return torch.cuda.memory_allocated(self.place) if self.is_cuda else 0

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        """Return the most bytes of tensors while a call runs, those held before included; on a CPU the growth."""
        if not self.is_cuda:
            return max(0, peak_bytes(call))
        torch.cuda.reset_peak_memory_stats(self.place)
        call()
        self.wait()
        return torch.cuda.max_memory_allocated(self.place)


def gib(size: float) -> float:
    return round(size / GIB, 3)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device and how much is measured on it."""

    device: Device
    scale: float
    """Below 1, models, lengths and buffers are smaller by it, to try the check out on a CPU."""
    repeats: int
    kits: tuple[str, ...]
    """Those whose passes are compared."""
    folder: Path
    """For tiny checkpoints."""

    def scaled(self, count: int, *, least: int = 1) -> int:
        return max(least, round(count * min(1.0, self.scale)))


class Once(Generic[T]):
    """Makes a thing of a stage when a measurement first needs it; what could not be made is tried again by the next."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: list[T] = []

    def __call__(self) -> T:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]
