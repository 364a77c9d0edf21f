"""Keys and values of a packed sequence, prefixes repeated for each segment; gradients are summed in single precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lmm_r1.models.packed.layout import VarlenLayout


def repeat_prefixes(tensor: torch.Tensor, varlen: VarlenLayout, *, dim: int) -> torch.Tensor:
    """Return keys or values with the T tokens along `dim` in the order of all segments' keys, prefixes repeated.

    A prefix's gradient is the sum of those of its copies: in half precision it would be rounded with every response.
    """
    return _RepeatPrefixes.apply(tensor, varlen, dim) if varlen.prefixes else tensor


class _RepeatPrefixes(torch.autograd.Function):
    """`index_select`, whose gradients are summed in single precision, in one order, and rounded once."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, varlen: VarlenLayout, dim: int) -> torch.Tensor:
        ctx.varlen, ctx.dim = varlen, dim
        return tensor.index_select(dim, varlen.key_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dim = ctx.dim
        total = gradient.index_select(dim, ctx.varlen.own_keys)
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        for prefix in ctx.varlen.prefixes:
            copies = gradient.index_select(dim, prefix.copies.flatten()).unflatten(dim, prefix.copies.shape)
            total.narrow(dim, prefix.start, prefix.copies.shape[1]).copy_(copies.sum(dim, dtype=dtype))
        return total, None, None
