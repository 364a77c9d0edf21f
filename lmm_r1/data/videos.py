"""Videos as sampled frames, the same ones for training and for rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Video:
    """Frames that were sampled from a video."""

    frames: np.ndarray
    """(N, H, W, 3), uint8, RGB, N >= 1."""
    fps: float
    """How many of these frames stand for one second."""
