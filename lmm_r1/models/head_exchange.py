"""The exchange of Ulysses: within attention each rank of a group has all tokens for some heads, elsewhere some tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist


def tokens_for_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this rank's heads of all T tokens, (1, H / N, T, D) and (1, K / N, T, D), for all heads of its T / N tokens.

    Keys and values are repeated where the ranks do not divide them, so that each rank has those of its own queries.
    """
    size = dist.get_world_size(group)
    repeats = size // math.gcd(key.shape[1], size)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    parts = [tensor[0].unflatten(0, (size, -1)) for tensor in (query, key, value)]  # (N, heads, T / N, D) each
    sent = [part.flatten(1) for part in parts]
    received = _AllToAll.apply(torch.cat(sent, dim=1), group).split([part.shape[1] for part in sent], dim=1)
    # What came from a rank are the tokens of its share.
    whole = [
        tokens.unflatten(1, part.shape[1:]).transpose(0, 1).flatten(1, 2)[None]
        for tokens, part in zip(received, parts, strict=True)
    ]
    return whole[0], whole[1], whole[2]


def heads_for_tokens(output: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all heads of this rank's tokens, (1, T / N, H, D), for its heads of all tokens, (1, T, H / N, D)."""
    parts = output[0].unflatten(0, (dist.get_world_size(group), -1))  # (N, T / N, heads, D)
    return _AllToAll.apply(parts, group).transpose(0, 1).flatten(1, 2)[None]


class _AllToAll(torch.autograd.Function):
    """Sends the nth part of a tensor (N, ...) to rank n; a gradient goes back the way its value came."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # What is made like a tensor with other strides has these strides, too, and would be filled in another order.
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
