"""Stand-ins for a GPU's kernels over sequences of varying length, with their signatures.

What they compute is attention in double precision, sequence by sequence; they note what they are called with.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Calls = list[dict[str, Any]]


def reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    sides: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    """Outputs (T, H, D) of queries (T, H, D) over keys and values (K, G, D); the last query stands at the last key.

    Args:
        sides: how many tokens before and behind itself a token sees, -1 for all.
    """
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert len(query_ends) == len(key_ends)
    assert (int(query_ends.diff().max()), int(key_ends.diff().max())) == (longest_query, longest_key)
    assert (int(query_ends[-1]), int(key_ends[-1])) == (len(queries), len(keys))
    outputs = []
    for index in range(len(query_ends) - 1):
        q = queries[query_ends[index] : query_ends[index + 1]].transpose(0, 1).double()  # (H, L, D)
        part = slice(key_ends[index], key_ends[index + 1])
        k, v = (tensor[part].transpose(0, 1).double() for tensor in (keys, values))
        places = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        back = places - torch.arange(k.shape[1])
        mask = torch.ones_like(back, dtype=torch.bool)
        mask &= back <= sides[0] if sides[0] >= 0 else mask
        mask &= -back <= sides[1] if sides[1] >= 0 else mask
        result = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(result[0].transpose(0, 1))
    return torch.cat(outputs).to(queries.dtype)


def flash_attn(calls: Calls) -> Callable[..., torch.Tensor]:
    """Return flash-attn's kernel, as its documentation has it."""

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        calls.append({"causal": causal, "window_size": window_size, "heads": (q.shape[1], k.shape[1])})
        sides = (window_size[0], 0) if causal else window_size
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return reference(q, k, v, *ends, sides=sides, scale=softmax_scale)

    return flash_attn_varlen_func


def of_torch(calls: Calls) -> Callable[..., torch.Tensor]:
    """Return a kernel with the signature of PyTorch 2.13."""

    def varlen_attn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        heads = (query.shape[1], key.shape[1])
        assert enable_gqa or heads[0] == heads[1], "PyTorch raises ValueError"
        calls.append({"window_size": window_size, "enable_gqa": enable_gqa, "heads": heads})
        return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, sides=window_size, scale=scale)

    return varlen_attn
