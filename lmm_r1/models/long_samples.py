"""Rows of short and long samples where `longrope` turns tokens by other factors beyond a length: each sample by its own.

Transformers chooses the factors for a whole batch, by its greatest position.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig


def length_limit(config: PretrainedConfig) -> int | None:
    """Return beyond how many tokens a sample is turned by the factors for long ones; None where there are none."""
    text = config.get_text_config()
    # Not every config has these.
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or text.original_max_position_embeddings


def turn_by_sample(language_model: torch.nn.Module, *, is_long: torch.Tensor, limit: int) -> list[RemovableHandle]:
    """Let a language model turn each token as its own sample asks for, until the handles are removed.

    Args:
        is_long: of each of its tokens, whether it is of a sample of more than `limit` tokens, (T,).
    """

    def turn(
        module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = named_inputs(module, args, kwargs)
        positions = given["position_ids"]  # (..., T)
        # Neither call sees a position of the other kind; in the second, one behind the last token makes up for them.
        beyond = positions.new_full((*positions.shape[:-1], 1), limit)
        short = module.forward(**{**given, "position_ids": positions.masked_fill(is_long, 0)})
        long = module.forward(**{**given, "position_ids": torch.cat([positions, beyond], dim=-1)})
        chosen = is_long[:, None]
        cos, sin = (torch.where(chosen, far[..., :-1, :], near) for far, near in zip(long, short, strict=True))
        return cos, sin

    return [
        module.register_forward_hook(turn, with_kwargs=True)
        for module in language_model.modules()
        if "longrope" in rope_types(module)
    ]


def rope_types(module: torch.nn.Module) -> set[str]:
    """Return the kinds of a rotary embedding, one for each kind of layer; none for any other module."""
    # An attribute of transformers' rotary embeddings: a name, or one per kind of layer.
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return set(kinds.values())
    return {kinds} if isinstance(kinds, str) else set()


def named_inputs(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a module was called with, by the names of its parameters."""
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
