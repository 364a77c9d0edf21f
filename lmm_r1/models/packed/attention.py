"""Attention over packed sequences, registered with transformers under one name for every architecture.

The layout reaches the attention layers instead of a mask, so it is there again when activations are recomputed in the
backward pass. Other inputs go to PyTorch's SDPA.

In Gated DeltaNet layers each segment starts from the state at the end of its prefix. Transformers' layers call two
functions of their module: the convolution and the delta rule. Both are replaced once per module, and get the layout as a
keyword argument that the language model hands to all of its layers. Without it, the functions of transformers run.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from subprocess import CalledProcessError
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lmm_r1.lmm_kits.delta_rule import (
    LINEAR_LAYER,
    PACKED_MODULES,
    REPLACED_FUNCTIONS,
    Borders,
    SegmentTree,
    convolved_at_borders,
    gated_delta_rule,
)
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment, VarlenKernel, kernel_for, repeat_prefixes

logger = logging.getLogger(__name__)

BLOCK = 128
"""Tokens of a block; blocks in which no token attends to any other are left out."""
# Rows of the mask that are computed at a time: the mask of a whole sequence would be too large.
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

    Padding up to `_filled` is a segment of its own. The window is passed as a tensor, so that the kernel is compiled
    once for all windows.
    """
    end = layout.length
    segments = (*layout.segments, PackedSegment(start=end, end=_filled(end)))
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
    layout = PackedLayout(segments=(PackedSegment(start=0, end=2 * BLOCK),))
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


# No "flash" in it: transformers would look for a kernel of that name.
PACKED_ATTENTION = "lmm_packed"
# Keyword arguments of attention layers that change the scores in a way that no kernel here computes.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedMask:
    """Passed instead of a mask: the packed layout and the window of the layers."""

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
    tower, layers = _tower_of(model), set(getattr(text, "layer_types", None) or ())
    is_linear = LINEAR_LAYER in layers and has_delta_rule(tower)
    if not (tower._supports_attention_backend or is_linear):
        return f"{name} has no attention that transformers can replace"
    if tower._is_stateful and not is_linear:
        return f"{name} has layers of another kind than attention"
    # Not every config has these, and some have them switched off.
    if getattr(text, "attention_chunk_size", None):
        return f"{name} attends in chunks of tokens"
    if getattr(text, "attn_logit_softcapping", None):
        return f"{name} caps its attention scores"
    others = layers - {"full_attention", "sliding_attention", *([LINEAR_LAYER] if is_linear else [])}
    if others:
        return f"{name} has layers of another kind than attention ({', '.join(sorted(others))})"
    if any(weight.endswith(".sinks") for weight, _ in model.named_parameters()):
        return f"{name} attends to sinks"
    return None


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch the text tower of a loaded model to `PACKED_ATTENTION`; vision towers keep what they have."""
    text = model.config.get_text_config()
    parts = {key: config for key in model.config.sub_configs if (config := getattr(model.config, key)) is not None}
    names = {key: config._attn_implementation for key, config in parts.items() if config is not text}
    key = next((key for key, config in parts.items() if config is text), "")  # "" is the model's own config
    model.set_attn_implementation({**names, key: PACKED_ATTENTION})
    tower = _tower_of(model)
    if has_delta_rule(tower):
        use_packed_delta_rule(tower, _current_layout)


def _tower_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model: with a config of its own, it is an inner module."""
    text = model.config.get_text_config()
    towers = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is text]
    return towers[-1]


def _current_layout() -> PackedLayout | None:
    current = _current.get()
    return None if current is None else current.layout


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
    layout, group = attention_mask.layout.seen_with(window=window), attention_mask.group
    if group is not None:
        query, key, value = tokens_for_heads(query, key, value, group=group)
    kernel = None if any(layout.has_block) else kernel_for(query, value, dropout=dropout)
    if kernel is not None:
        output = _in_one_call(kernel, query, key, value, layout, window=window, scaling=scaling)
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


def _in_one_call(
    kernel: VarlenKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    *,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attend over all segments in one call of the GPU's kernel for sequences of varying length."""
    varlen = layout.varlen(device=query.device)
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
    received = _exchanged(torch.cat(sent, dim=1), group).split([part.shape[1] for part in sent], dim=1)
    # What came from a rank are the tokens of its share.
    whole = [
        tokens.unflatten(1, part.shape[1:]).transpose(0, 1).flatten(1, 2)[None]
        for tokens, part in zip(received, parts, strict=True)
    ]
    return whole[0], whole[1], whole[2]


def heads_for_tokens(output: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all heads of this rank's tokens, (1, T / N, H, D), for its heads of all tokens, (1, T, H / N, D)."""
    parts = output[0].unflatten(0, (dist.get_world_size(group), -1))  # (N, T / N, heads, D)
    return _exchanged(parts, group).transpose(0, 1).flatten(1, 2)[None]


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send the nth part of a tensor (N, ...) to rank n; a gradient goes back the way its value came."""
    # What is made like a tensor with other strides has these strides, too, and would be filled in another order.
    parts = parts.contiguous()
    return all_to_all_single(torch.empty_like(parts), parts, group=group)


AttentionInterface.register(PACKED_ATTENTION, _attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _mask)


PACKED_ARGUMENT = "packed_layout"


def has_delta_rule(tower: PreTrainedModel) -> bool:
    """Return whether a language model's linear layers are Gated DeltaNets that take packed sequences."""
    return type(tower).__module__ in PACKED_MODULES


def use_packed_delta_rule(tower: PreTrainedModel, layout: Callable[[], PackedLayout | None]) -> RemovableHandle:
    """Let a language model's linear layers take packed sequences.

    Args:
        layout: returns that of the sequence on which the model is being run; None if it is not packed.
    """
    module = sys.modules[type(tower).__module__]
    ours: tuple[Callable[..., Any], ...] = (_packed_convolution, _packed_rule)
    for name, replacement in zip(REPLACED_FUNCTIONS, ours, strict=True):
        function = getattr(module, name)
        if not hasattr(function, "takes_packed"):
            replaced: Any = functools.partial(replacement, function)
            replaced.takes_packed = True
            setattr(module, name, replaced)

    def add_layout(module: torch.nn.Module, args: tuple, kwargs: Mapping[str, object]) -> tuple | None:
        current = layout()
        return None if current is None else (args, {**kwargs, PACKED_ARGUMENT: current})

    return tower.register_forward_pre_hook(add_layout, with_kwargs=True)


def _packed_convolution(
    function: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the convolved inputs (1, D, T): over the whole sequence at once, and again at the segments' borders."""
    whole = function(hidden_states, weight, bias, activation=activation, **kwargs)
    if packed_layout is None or len(packed_layout.segments) == 1:
        return whole
    width, device = weight.shape[-1], hidden_states.device
    borders = packed_layout.once(
        ("borders", width, device), lambda: Borders.of(_tree(packed_layout, device), width=width)
    )
    convolved = convolved_at_borders(hidden_states[0].t(), weight, bias, borders)
    if activation is not None:
        convolved = ACT2FN[activation](convolved)
    return whole.index_copy(2, borders.tokens, convolved.to(whole.dtype).t()[None])


def _packed_rule(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the outputs (1, T, H, V) of queries and keys (1, T, H, K), and no state, for a packed sequence."""
    if packed_layout is None:
        return function(query, key, value, *args, **kwargs)
    assert not args, "transformers names decay and beta"
    assert kwargs["use_qk_l2norm_in_kernel"], "queries and keys are normalised"
    decay, beta = kwargs["g"], kwargs["beta"]
    tree = _tree(packed_layout, query.device)
    kernel = _flash_linear_attention() if query.is_cuda else None
    if kernel is not None:
        return by_depth(kernel, query, key, value, decay, beta, tree), None
    outputs, _ = gated_delta_rule(query[0], key[0], value[0], decay[0], beta[0], tree)
    return outputs[None].to(value.dtype), None


@functools.cache
def _flash_linear_attention() -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None:
    """Return flash-linear-attention's delta rule, which takes several sequences at once; None if it cannot be imported.

    The function of transformers does not do: if the package is broken, it runs in PyTorch and ignores where sequences end.
    """
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        logger.warning("flash-linear-attention cannot be imported; linear attention runs in PyTorch: %s", error)
        return None
    return chunk_gated_delta_rule


def by_depth(
    rule: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    tree: SegmentTree,
) -> torch.Tensor:
    """Return the outputs (1, T, H, V) by calls of flash-linear-attention's function, one for all segments of a depth.

    It takes several sequences at once, each with a state (S, H, K, V) to start from, and differentiates all of them.
    """
    outputs, order = [], []
    states: torch.Tensor | None = None
    place: dict[int, int] = {}
    for depth in range(max(tree.depths) + 1):
        segments = [index for index, own in enumerate(tree.depths) if own == depth and tree.lengths[index]]
        ends = torch.tensor([0, *(tree.lengths[index] for index in segments)]).cumsum(0)
        tokens = torch.cat(
            [torch.arange(tree.starts[index], tree.starts[index] + tree.lengths[index]) for index in segments]
        ).to(tree.device)
        initial = None
        if states is not None:
            prefixes = (tree.prefixes[index] for index in segments)
            above = torch.tensor([place[prefix] for prefix in prefixes if prefix is not None], device=tree.device)
            initial = states.index_select(0, above)
        given = [tensor.index_select(1, tokens) for tensor in (query, key, value)]
        output, states = rule(
            *given,
            g=decay.index_select(1, tokens),
            beta=beta.index_select(1, tokens),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=ends.to(tree.device),
        )
        place = {index: number for number, index in enumerate(segments)}
        outputs.append(output)
        order.append(tokens)
    back = torch.cat(order).argsort()
    return torch.cat(outputs, dim=1).index_select(1, back)


def _tree(layout: PackedLayout, device: torch.device) -> SegmentTree:
    return layout.once(
        ("tree", device),
        lambda: SegmentTree(
            lengths=layout.lengths, prefixes=tuple(segment.prefix for segment in layout.segments), device=device
        ),
    )
