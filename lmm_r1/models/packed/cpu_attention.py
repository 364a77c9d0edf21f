"""Attention over packed sequences on CPUs, and in blocks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from subprocess import CalledProcessError
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from lmm_r1.models.packed.layout import PackedLayout, Segment

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


logger = logging.getLogger(__name__)

BLOCK = 128
"""Tokens of a block; blocks in which no token attends to any other are left out."""
# Of so many tokens at once it is worked out which they attend to: the mask of a whole sequence would be too large.
_ROWS = 8 * BLOCK
_HALF = (torch.bfloat16, torch.float16)

TokenMask: TypeAlias = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether a token attends to another, for (batch, head, query, key); indices may have any shapes that broadcast."""


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Return the outputs (1, T, H, D) of queries (1, H, T, D) over keys and values (1, K, T, D)."""
    window = window if layout.cuts(window=window) else None
    mask = layout.once(
        ("blocks", window, query.device), lambda: block_mask(layout, window=window, device=query.device)
    )
    # One order in memory, and whole blocks: the kernel is compiled once for all sequences.
    missing = _filled(layout.length) - layout.length
    query, key, value = (pad(tensor, (0, 0, 0, missing)).contiguous() for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    output = _kernel()(query, key, value, block_mask=mask, scale=scaling, enable_gqa=grouped)
    return output[:, :, : layout.length].transpose(1, 2).contiguous()


def fits_block_kernel(query: torch.Tensor, key: torch.Tensor, *, dropout: float) -> bool:
    """Whether `attend_in_blocks` takes this: on a GPU, in half precision, without dropout, where the kernel compiles."""
    if not query.is_cuda or query.dtype not in _HALF or dropout:
        return False
    return _compiles(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[-1])


def token_mask(layout: PackedLayout, *, window: int | None, device: torch.device) -> TokenMask:
    """Return which of a packed sequence's T tokens attend to which, as `layout.mask` says segment by segment.

    Those behind its end, up to `_filled`, are a segment of their own. A window is no number of the function's but
    in a tensor: else the kernel would be compiled for each.
    """
    end = layout.length
    segments = (*layout.segments, Segment(start=end, end=_filled(end)))
    lengths = torch.tensor([segment.length for segment in segments])

    def of_tokens(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).repeat_interleave(lengths)

    # A token is seen from its segment's first one on, up to the end of all that has the segment in its prefix.
    first = of_tokens([segment.start for segment in segments])
    behind = of_tokens([*layout.tree_ends, _filled(end)])
    before = of_tokens([layout.prefix_length(segment) - segment.start for segment in segments])
    position = torch.arange(len(first), dtype=torch.int32) + before
    horizon = torch.full_like(position, -1) if window is None else position - window
    run = torch.full_like(position, -1)
    if layout.block_ids is not None:
        run[:end] = layout.block_ids
    first, behind, position, horizon, run = (tensor.to(device) for tensor in (first, behind, position, horizon, run))

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        reachable = (first[key] <= query) & (query < behind[key])
        together = (run[query] == run[key]) & (run[query] >= 0)
        near = position[key] > horizon[query]
        return ((reachable & (position[key] <= position[query])) | together) & near

    return sees


def block_mask(layout: PackedLayout, *, window: int | None, device: torch.device) -> Any:
    """Return FlexAttention's `BlockMask` of a packed sequence, its length as `_filled` says."""
    from torch.nn.attention.flex_attention import BlockMask

    sees = token_mask(layout, window=window, device=device)
    tokens = torch.arange(_filled(layout.length), device=device)
    counts = torch.cat(
        [
            sees(None, None, rows[:, None], tokens[None])
            .unflatten(1, (-1, BLOCK))
            .unflatten(0, (-1, BLOCK))
            .sum((1, 3))
            for rows in tokens.split(_ROWS)
        ]
    )
    full = counts == BLOCK * BLOCK
    some, whole = _ordered((counts > 0) & ~full), _ordered(full)
    return BlockMask.from_kv_blocks(
        *some, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(len(tokens), len(tokens))
    )


def _filled(length: int) -> int:
    """Return the least number of whole blocks' tokens for a sequence, two at least: for one, PyTorch compiles anew."""
    return max(2 * BLOCK, length + -length % BLOCK)


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks of keys each block of queries has, (1, 1, N), and which, in front, (1, 1, N, N)."""
    places = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], places.int()[None, None]


@cache
def _kernel() -> Callable[..., torch.Tensor]:
    """Return the compiled kernel; not compiled, it would compute the scores of all tokens with all."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True, dynamic=True)


@cache
def _compiles(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> bool:
    """Whether a pass over few tokens forwards and backwards runs: a compiler may be missing, or heads too wide."""
    import torch._dynamo

    # The first is read whenever something is compiled, the second's variable when PyTorch is imported.
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" or torch._dynamo.config.disable:
        return False
    layout = PackedLayout(segments=(Segment(start=0, end=2 * BLOCK),))
    try:
        with torch.enable_grad():
            query, key, value = (
                torch.zeros(1, count, layout.length, width, dtype=dtype, device=device, requires_grad=True)
                for count in (heads, key_heads, key_heads)
            )
            attend_in_blocks(query, key, value, layout, window=None, scaling=None).sum().backward()
    except (ImportError, OSError, RuntimeError, CalledProcessError) as error:
        logger.warning(
            "FlexAttention does not compile for %d heads of %d; sequences with bidirectional attention are computed "
            "segment by segment: %s",
            heads,
            width,
            error,
        )
        return False
    logger.info("attention over packed sequences with bidirectional attention: FlexAttention, compiled")
    return True
