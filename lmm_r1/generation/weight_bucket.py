"""Several weights as one flat buffer, as they go from the trainer to the engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

# So much is held beside the model, gathered and as a buffer, and sent in one call to each engine.
BUCKET_BYTES = 512 * 2**20
# Every weight begins at a multiple of it, so that it can be read as numbers of any type.
ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class WeightSlot:
    """Where one weight stands in a buffer of bytes."""

    name: str
    """The checkpoint's."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + self.dtype.itemsize * torch.Size(self.shape).numel()


def slots_of(weights: Mapping[str, torch.Tensor]) -> list[WeightSlot]:
    """Return where weights stand that lie one behind the other."""
    sizes = (-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for weight in weights.values())
    starts = accumulate(sizes, initial=0)
    return [
        WeightSlot(name=name, dtype=weight.dtype, shape=tuple(weight.shape), start=start)
        for (name, weight), start in zip(weights.items(), starts, strict=False)
    ]


def empty_buffer(slots: Iterable[WeightSlot], *, device: torch.device) -> torch.Tensor:
    """Return bytes for all slots."""
    return torch.empty(max((slot.end for slot in slots), default=0), dtype=torch.uint8, device=device)


def weights_in(buffer: torch.Tensor, slots: Iterable[WeightSlot]) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a buffer by name; they share its memory."""
    return [(slot.name, buffer[slot.start : slot.end].view(slot.dtype).view(slot.shape)) for slot in slots]
