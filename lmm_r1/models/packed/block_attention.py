"""Attention over packed sequences in one kernel on GPUs whatever the layout is: PyTorch's FlexAttention.

For bidirectional runs, which kernels for sequences of varying length do not take. Prefixes are read where they stand.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from subprocess import CalledProcessError
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from lmm_r1.models.packed.layout import PackedLayout, Segment

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
