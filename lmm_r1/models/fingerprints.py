"""Names of tensors by their content, computed where they are: two hashes of 64 bits each."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

# Numbers of 16 bits are added up, each times a random number of 64 bits of its place in a line of so many; then so are the
# sums of all lines, as numbers of 16 bits, until one is left.
LINE = 4096
ROUNDS = 5
# So many lines at a time: a number of 16 bits takes 64 while it is multiplied.
CHUNK = 1024


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return a name of each tensor's bits, whatever their shape and type.

    Two contents that differ have the same name with a probability below 2 ** -80 (multilinear hashing,
    https://arxiv.org/abs/1202.4961), over the random numbers, which are the same in all processes. A GPU is waited for once.
    """
    found = [_hashes(tensor) for tensor in tensors]
    return [(one, other) for one, other in torch.stack(found).tolist()] if found else []


def _hashes(tensor: torch.Tensor) -> torch.Tensor:
    """Return both hashes, (2,)."""
    words = _words(tensor)
    for numbers in _numbers(str(tensor.device)):
        lines = torch.nn.functional.pad(words, (0, -len(words) % LINE)).view(-1, LINE)
        sums = torch.cat([_sums(chunk, numbers) for chunk in lines.split(CHUNK)])  # (lines, 2)
        if len(sums) == 1:
            return sums[0]
        words = _words(sums)
    raise AssertionError("no tensor has so many lines")


def _sums(lines: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return both sums of each line (L, LINE), (L, 2); they wrap around at 64 bits."""
    wide = lines.long()
    return torch.stack([(wide * row).sum(dim=1) for row in numbers], dim=1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers of 16 bits, (W,)."""
    flat = tensor.detach().contiguous().flatten()
    if not flat.numel():
        flat = flat.new_zeros(1)
    return flat.to(torch.int16) if flat.element_size() == 1 else flat.view(torch.int16)


@cache
def _numbers(device: str) -> torch.Tensor:
    """Return the random numbers of each round and hash, (ROUNDS, 2, LINE)."""
    generator = torch.Generator().manual_seed(0x1F3A)
    numbers = torch.randint(-(2**63), 2**63 - 1, (ROUNDS, 2, LINE), dtype=torch.int64, generator=generator)
    return numbers.to(device)
