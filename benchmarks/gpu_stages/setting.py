"""What all stages are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gpu_stages.device import Device

T = TypeVar("T")


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
