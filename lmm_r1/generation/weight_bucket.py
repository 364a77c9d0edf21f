"""Weights of a model in one buffer of bytes, which another process opens."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

# So much is held beside the model, gathered and as a buffer, and sent in one call to each engine.
BUCKET_BYTES = 512 * 2**20


# Every weight begins at a multiple of it, so that it can be read as numbers of any type.
ALIGNMENT = 256


class WeightSlot(NamedTuple):
    """Where one weight is stored in a buffer of bytes; msgpack carries it as the list of its fields."""

    name: str
    """The checkpoint's."""
    type_name: str
    """Of the numbers, as PyTorch names it: `bfloat16`."""
    shape: Sequence[int]
    start: int

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.type_name)

    @property
    def end(self) -> int:
        return self.start + self.dtype.itemsize * torch.Size(self.shape).numel()


def received_slots(sent: Iterable[Sequence[Any]]) -> list[WeightSlot]:
    """Return the slots that a trainer has sent, as a worker gets them."""
    return [WeightSlot(*fields) for fields in sent]


def handle_of(buffer: torch.Tensor) -> bytes:
    """Return what another process opens a buffer with; for one on a GPU this is CUDA's handle of its memory.

    PyTorch gives a function and its arguments, which ranks exchange pickled in any case; bytes reach the workers unchanged.
    """
    return pickle.dumps(reduce_tensor(buffer))


def opened(handle: bytes, *, device: torch.device) -> torch.Tensor:
    """Return the buffer of a handle; one on a GPU is this process's `device`, which may have another number elsewhere."""
    rebuild, arguments = pickle.loads(handle)
    if rebuild is rebuild_cuda_tensor:
        arguments = (*arguments[:6], device.index, *arguments[7:])
    return rebuild(*arguments)


def slots_of(weights: Mapping[str, torch.Tensor]) -> list[WeightSlot]:
    """Return where weights are stored that follow one another."""
    sizes = (-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for weight in weights.values())
    starts = accumulate(sizes, initial=0)
    return [
        WeightSlot(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape), start)
        for (name, weight), start in zip(weights.items(), starts, strict=False)
    ]


def empty_buffer(slots: Iterable[WeightSlot], *, device: torch.device) -> torch.Tensor:
    """Return bytes for all slots."""
    return torch.empty(max((slot.end for slot in slots), default=0), dtype=torch.uint8, device=device)


def weights_in(buffer: torch.Tensor, slots: Iterable[WeightSlot]) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a buffer by name; they share its memory."""
    return [(slot.name, buffer[slot.start : slot.end].view(slot.dtype).view(slot.shape)) for slot in slots]
