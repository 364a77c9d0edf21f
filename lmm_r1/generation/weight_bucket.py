"""Weights of a model in one byte buffer, which another process opens."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

# Gathered and copied into a buffer, in addition to the model, and sent in one call to each engine.
BUCKET_BYTES = 512 * 2**20
# Every weight starts at a multiple of it, so that it can be viewed with any dtype.
ALIGNMENT = 256


class WeightSlot(NamedTuple):
    """The position of one weight in a byte buffer; msgpack sends it as a list of its fields."""

    name: str
    """The name in the checkpoint."""
    type_name: str
    """The dtype, by its name in PyTorch: `bfloat16`."""
    shape: Sequence[int]
    start: int

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.type_name)

    @property
    def end(self) -> int:
        return self.start + self.dtype.itemsize * torch.Size(self.shape).numel()


def handle_of(buffer: torch.Tensor) -> bytes:
    """Return a handle with which another process opens a buffer; for a GPU, CUDA's handle of its memory.

    PyTorch's handle is a function with its arguments; it is pickled because bytes reach the workers unchanged.
    """
    return pickle.dumps(reduce_tensor(buffer))


def opened(handle: bytes, *, device: torch.device) -> torch.Tensor:
    """Return the buffer of a handle, on this process's `device`, whose index may differ in other processes."""
    rebuild, arguments = pickle.loads(handle)
    if rebuild is rebuild_cuda_tensor:
        arguments = (*arguments[:6], device.index, *arguments[7:])
    return rebuild(*arguments)


def slots_of(weights: Mapping[str, torch.Tensor]) -> list[WeightSlot]:
    """Return the slots of consecutive weights."""
    sizes = (-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for weight in weights.values())
    starts = accumulate(sizes, initial=0)
    return [
        WeightSlot(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape), start)
        for (name, weight), start in zip(weights.items(), starts, strict=False)
    ]


def empty_buffer(slots: Iterable[WeightSlot], *, device: torch.device) -> torch.Tensor:
    """Return an uninitialized buffer for all slots."""
    return torch.empty(max((slot.end for slot in slots), default=0), dtype=torch.uint8, device=device)


def weights_in(buffer: torch.Tensor, slots: Iterable[WeightSlot]) -> list[tuple[str, torch.Tensor]]:
    """Return the weights in a buffer by name, as views."""
    return [(slot.name, buffer[slot.start : slot.end].view(slot.dtype).view(slot.shape)) for slot in slots]
