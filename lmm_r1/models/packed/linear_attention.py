"""Gated DeltaNet layers over packed sequences: each segment starts from the state at the end of its prefix.

Transformers' layers call two functions of their module: the convolution and the delta rule. Both are replaced once per
module, and get the layout as a keyword argument that the language model hands to all of its layers. So it is there again
when activations are recomputed in the backward pass. Without it, the functions of transformers run.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from lmm_r1.lmm_kits.delta_rule import (
    PACKED_MODULES,
    REPLACED_FUNCTIONS,
    Borders,
    SegmentTree,
    convolved_at_borders,
    gated_delta_rule,
)
from lmm_r1.models.packed.layout import PackedLayout

logger = logging.getLogger(__name__)

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
