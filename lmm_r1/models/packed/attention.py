"""Attention over packed sequences, registered with transformers under one name for every architecture.

The layout reaches the attention layers in the place of their mask, so that it is there again when activations are
recomputed in the backward pass. Whatever is not a packed sequence goes to PyTorch's SDPA as if it had been asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lmm_r1.models.packed.cpu_attention import attend_in_blocks, attend_on_cpu, fits_block_kernel, fits_cpu_kernel
from lmm_r1.models.packed.layout import PackedLayout, repeat_prefixes
from lmm_r1.models.packed.varlen_kernel import varlen_kernel

# No "flash" in it: transformers would look for a kernel of that name.
PACKED_ATTENTION = "lmm_packed"
# Keyword arguments of attention layers that change the scores in a way that no kernel here computes.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedMask:
    """What stands in the place of a mask: the layout of the packed sequence, and how far the layers that get it look back."""

    layout: PackedLayout
    window: int | None
    group: dist.ProcessGroup | None
    """The ranks that share its tokens; None where all of them are here."""


_current: ContextVar[PackedMask | None] = ContextVar("the packed sequence that the model runs on", default=None)


@contextmanager
def packed_as(layout: PackedLayout, *, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let models whose text tower uses `PACKED_ATTENTION` take their input (1, T) for packed as `layout` says.

    Args:
        group: the ranks whose attention layers get equal shares of the T tokens, in their order.
    """
    token = _current.set(PackedMask(layout=layout, window=None, group=group))
    try:
        yield
    finally:
        _current.reset(token)


def packing_refusal(model: PreTrainedModel) -> str | None:
    """Return why a model's text tower cannot take packed sequences, for a message; None where it can."""
    text = model.config.get_text_config()
    name = type(model).__name__
    tower = next(module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is text)
    if not tower._supports_attention_backend:
        return f"{name} has no attention that transformers can replace"
    if tower._is_stateful:
        return f"{name} has layers of another kind than attention"
    # Not every config has these, and some have them switched off.
    if getattr(text, "attention_chunk_size", None):
        return f"{name} attends in chunks of tokens"
    if getattr(text, "attn_logit_softcapping", None):
        return f"{name} caps its attention scores"
    layers = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if layers:
        return f"{name} has layers of another kind than attention ({', '.join(sorted(layers))})"
    if any(weight.endswith(".sinks") for weight, _ in model.named_parameters()):
        return f"{name} attends to sinks"
    return None


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch the text tower of a loaded model to `PACKED_ATTENTION`; vision towers keep what they have."""
    text = model.config.get_text_config()
    names = {
        key: config._attn_implementation
        for key in model.config.sub_configs
        if (config := getattr(model.config, key)) is not None and config is not text
    }
    names["" if text is model.config else _key_of(model.config, text)] = PACKED_ATTENTION
    model.set_attn_implementation(names)


def _key_of(config: PretrainedConfig, inner: PretrainedConfig) -> str:
    return next(key for key in config.sub_configs if getattr(config, key) is inner)


def _mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> PackedMask | torch.Tensor | None:
    """Return the layout of the packed sequence that is being run, or SDPA's mask where there is none."""
    current = _current.get()
    if current is None:
        return sdpa_mask(*args, local_size=local_size, **kwargs)
    return replace(current, window=local_size)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PackedMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the outputs (1, T, H, D) of queries (1, H, T, D) over keys and values (1, K, T, D), as transformers asks."""
    if not isinstance(attention_mask, PackedMask):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert all(kwargs.get(name) is None for name in _UNSUPPORTED), "refused by packing_refusal"
    # Not every architecture makes a mask of its own for its sliding layers; each names the window to them.
    window = attention_mask.window or kwargs.get("sliding_window")
    layout, group = attention_mask.layout, attention_mask.group
    if group is not None:
        query, key, value = tokens_for_heads(query, key, value, group=group)
    if _takes_varlen(query, value, layout, window=window, dropout=dropout):
        output = _in_one_call(query, key, value, layout, window=window, scaling=scaling)
    elif fits_block_kernel(query, key, dropout=dropout):
        output = attend_in_blocks(query, key, value, layout, window=window, scaling=scaling)
    else:
        output = _by_segment(query, key, value, layout, window=window, scaling=scaling, dropout=dropout)
    return (output if group is None else heads_for_tokens(output, group=group)), None


def _by_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    window: int | None,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attend segment by segment; masks are as large as a segment and its prefix, and are shared by all layers."""
    if fits_cpu_kernel(query, value, layout, window=window, dropout=dropout):
        return attend_on_cpu(query, key, value, layout, window=window, scaling=scaling)
    varlen = layout.varlen(device=query.device)
    # Slices would each send back a gradient of the whole sequence's length.
    queries = query.split(layout.lengths, dim=2)
    keys, values = (repeat_prefixes(tensor, varlen, dim=2).split(layout.key_lengths, dim=2) for tensor in (key, value))
    outputs = []
    for index, (own_queries, own_keys, own_values) in enumerate(zip(queries, keys, values, strict=True)):
        plain = layout.is_plain(index, window=window)
        outputs.append(
            scaled_dot_product_attention(
                own_queries,
                own_keys,
                own_values,
                attn_mask=None if plain else layout.mask(index, window=window, device=query.device),
                dropout_p=dropout,
                is_causal=plain,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _takes_varlen(
    query: torch.Tensor, value: torch.Tensor, layout: PackedLayout, *, window: int | None, dropout: float
) -> bool:
    """Whether the GPU's kernel for sequences of varying length takes this: causal, half precision, no dropout."""
    if not query.is_cuda or any(layout.has_block) or dropout:
        return False
    kernel = varlen_kernel()
    return kernel is not None and kernel.takes(query, value, window=window)


def _in_one_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attend over all segments in one call of the GPU's kernel for sequences of varying length."""
    kernel, varlen = varlen_kernel(), layout.varlen(device=query.device)
    assert kernel is not None, "asked before"
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (T, H, D), (T, K, D)
    keys, values = (repeat_prefixes(tensor, varlen, dim=0) for tensor in (keys, values))
    return kernel.attend(queries, keys, values, varlen, causal=True, window=window, scaling=scaling)[None]


def tokens_for_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this rank's heads of all T tokens, (1, H / N, T, D) and (1, K / N, T, D), for all heads of its T / N tokens.

    The exchange of DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509) over a group of N ranks.
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


AttentionInterface.register(PACKED_ATTENTION, _attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _mask)
