"""Attention over a packed sequence on CPUs: prefixes are read where they stand, by all that is behind them in one call.

What a segment gets from each part of its prefix and from itself is computed apart and merged by the log-sum-exps, which
is exact. PyTorch's kernel takes the merged values in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lmm_r1.models.packed.layout import PackedLayout

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Up to this many queries, the backward kernel is two to six times as fast in single precision as in bfloat16, in which
# it also rounds the sums for keys and values with each of its blocks of queries.
_SHORT = 384


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """One call of the kernel: which tokens' queries it takes, on which tokens' keys and values."""

    queries: slice
    keys: slice
    is_causal: bool
    bias: torch.Tensor | None
    """Added to the scores, (L, L)."""


def fits_cpu_kernel(
    query: torch.Tensor, value: torch.Tensor, layout: PackedLayout, *, window: int | None, dropout: float
) -> bool:
    """Whether `attend_on_cpu` takes this: on a CPU, without dropout, every segment sees all of its prefix."""
    one_width = query.shape[-1] == value.shape[-1]
    return query.device.type == "cpu" and one_width and not dropout and not layout.cuts_prefix(window=window)


def attend_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Return the outputs (1, T, H, D) of queries (1, H, T, D) over keys and values (1, K, T, D)."""
    own = tuple(_own_calls(layout, window=window, dtype=query.dtype))
    shared = tuple(_prefix_calls(layout))
    return _CpuAttention.apply(query, key, value, own, shared, scaling).transpose(1, 2)


def _own_calls(layout: PackedLayout, *, window: int | None, dtype: torch.dtype) -> Iterator[_Call]:
    """Yield the call of each segment on itself."""
    for index, segment in enumerate(layout.segments):
        tokens = slice(segment.start, segment.end)
        bias = None
        if layout.has_block[index] or (segment.prefix is None and not layout.is_plain(index, window=window)):
            mask = layout.mask(index, window=window, device=torch.device("cpu"))[:, -segment.length :]
            bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)
        yield _Call(queries=tokens, keys=tokens, is_causal=bias is None, bias=bias)


def _prefix_calls(layout: PackedLayout) -> Iterator[_Call]:
    """Yield the call of all tokens behind a segment in whose prefix it is."""
    for prefix, tokens in layout.runs:
        segment = layout.segments[prefix]
        yield _Call(queries=tokens, keys=slice(segment.start, segment.end), is_causal=False, bias=None)


class _CpuAttention(torch.autograd.Function):
    """A packed sequence's attention as calls of PyTorch's kernel for CPUs, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        own: tuple[_Call, ...],
        shared: tuple[_Call, ...],
        scaling: float | None,
    ) -> torch.Tensor:
        batch, heads, length, width = query.shape
        output = query.new_empty(batch, length, heads, width).transpose(1, 2)
        # Log-sum-exps (1, H, T), never in half precision.
        lse = query.new_empty(batch, heads, length, dtype=torch.promote_types(query.dtype, torch.float32))

        def attend(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
            parts = (query[:, :, call.queries], key[:, :, call.keys], value[:, :, call.keys])
            return _forward(*parts, 0.0, call.is_causal, attn_mask=call.bias, scale=scaling)

        for call in own:
            output[:, :, call.queries], lse[:, :, call.queries] = attend(call)
        for call in shared:
            _merge(output[:, :, call.queries], lse[:, :, call.queries], *attend(call))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.own, ctx.shared, ctx.scaling = own, shared, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        # What a token gets as part of its segment and of a prefix is summed in single precision.
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = [torch.empty_like(tensor, dtype=wide) for tensor in (query, key, value)]

        def gradients(call: _Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            dtype = torch.float32 if _is_short(call) and query.dtype.itemsize == 2 else query.dtype
            given = [tensor[:, :, call.queries].to(dtype) for tensor in (gradient, query)]
            given += [tensor[:, :, call.keys].to(dtype) for tensor in (key, value)]
            given += [output[:, :, call.queries].to(dtype), lse[:, :, call.queries]]
            bias = None if call.bias is None else call.bias.to(dtype)
            return _backward(*given, 0.0, call.is_causal, attn_mask=bias, scale=ctx.scaling)

        shared = [piece for whole in ctx.shared for piece in _pieces(whole, query.dtype)]
        for call in (*ctx.own, *shared):
            places = (call.queries, call.keys, call.keys)
            for total, place, part in zip(sums, places, gradients(call), strict=True):
                if call.keys == call.queries:
                    total[:, :, place] = part
                else:
                    total[:, :, place] += part
        for_query, for_key, for_value = (total.to(query.dtype) for total in sums)
        return for_query, for_key, for_value, None, None, None


def _is_short(call: _Call) -> bool:
    return call.queries.stop - call.queries.start <= _SHORT


def _pieces(call: _Call, dtype: torch.dtype) -> Iterator[_Call]:
    """Yield a call on a part of a prefix in pieces whose gradients are computed in single precision."""
    if dtype.itemsize != 2:
        yield call
        return
    for start in range(call.queries.start, call.queries.stop, _SHORT):
        yield replace(call, queries=slice(start, min(start + _SHORT, call.queries.stop)))


def _merge(output: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Extend outputs (1, H, L, D) over some keys, with their log-sum-exps (1, H, L), by those over more keys."""
    merged = torch.logaddexp(lse, more_lse)
    kept, added = ((part - merged).exp_().unsqueeze(-1) for part in (lse, more_lse))
    output.copy_(output * kept + more * added)
    lse.copy_(merged)
