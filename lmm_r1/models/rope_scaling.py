"""Rope scaling that depends on lengths: one choice for a whole run, the same as vLLM's.

`longrope` (https://arxiv.org/abs/2402.13753) scales rotary frequencies by short factors up to the length of the first
training and by long factors beyond. Transformers chooses for each batch, by its greatest position, so that a sample's
log-probs would depend on what it is packed with. vLLM chooses once: long factors where `max_model_len` is beyond that
length. So do we, by the longest sample that a run or a command allows.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lmm_r1.errors import UserError

logger = logging.getLogger(__name__)


def check_rope(config: PretrainedConfig, *, model: str) -> None:
    """Raise UserError for rope scaling that depends on the batch, so that training and vLLM cannot agree.

    Args:
        model: the flag and the path, for the message.
    """
    kinds = [kind for rope in _ropes(config) if "dynamic" in (kind := _kind(rope))]
    if kinds:
        raise UserError(
            f"{model}: rope_type '{kinds[0]}' changes the rotary frequencies of a whole batch with its longest row, so that "
            'training and vLLM compute other log-probs; set {"rope_type": "default"} in its config.json for samples that '
            f"fit in max_position_embeddings {_text(config).max_position_embeddings}, or a type that is the same for all "
            "lengths (linear, yarn)"
        )


def short_length(config: PretrainedConfig) -> int | None:
    """Return up to which longest sample the short factors of `longrope` hold; None for any other rope scaling."""
    limits = [_limit(rope, config) for rope in _ropes(config) if _kind(rope) == "longrope"]
    return min(limits, default=None)


def takes_long_factors(config: PretrainedConfig, *, max_len: int) -> bool:
    """Return whether a run whose longest sample has `max_len` tokens takes the long factors for all samples."""
    limit = short_length(config)
    return limit is not None and max_len > limit


def tell_factors(config: PretrainedConfig, *, max_len: int, flag: str) -> None:
    """Say in one line where all samples, short ones as well, take the long factors."""
    if takes_long_factors(config, max_len=max_len):
        logger.warning(
            "%s %d: all samples take the long factors of longrope, as in vLLM; up to %d they would take the short ones",
            flag,
            max_len,
            short_length(config),
        )


def settle_rope(model: PreTrainedModel, *, max_len: int | None) -> None:
    """Let a model scale every sample's frequencies by the factors of a run whose longest sample has `max_len` tokens."""
    if short_length(model.config) is None:
        return
    assert max_len is not None, "a model with longrope is loaded for samples of known length"
    is_long = takes_long_factors(model.config, max_len=max_len)
    for module in model.modules() if is_long else ():
        if "longrope" in _kinds_of_module(module):
            # One position beyond the limit makes transformers take the long factors; its own angles are dropped.
            module.register_forward_pre_hook(_append_position, with_kwargs=True)
            module.register_forward_hook(_without_last)


def keep_cache(model: PreTrainedModel) -> None:
    """Let a settled model that generates keep its keys and values where a response grows beyond the limit of `longrope`.

    Some classes of transformers 5.15 forget them there, as they would take other factors from then on; and what follows
    is then computed without the tokens before it.
    """
    if short_length(model.config) is None or not hasattr(model.config, "original_max_position_embeddings"):
        return
    prepare = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def without_limit(*args: Any, **kwargs: Any) -> Mapping[str, object]:
        config = model.config
        limit = config.original_max_position_embeddings
        config.original_max_position_embeddings = sys.maxsize
        try:
            return prepare(*args, **kwargs)
        finally:
            config.original_max_position_embeddings = limit

    model.prepare_inputs_for_generation = without_limit


def _append_position(
    module: torch.nn.Module, args: tuple, kwargs: Mapping[str, object]
) -> tuple[tuple, dict[str, Any]]:
    named = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    positions = named["position_ids"]  # (..., T)
    beyond = positions.new_full((*positions.shape[:-1], 1), short_length(module.config))
    return (), {**named, "position_ids": torch.cat([positions, beyond], dim=-1)}


def _without_last(
    module: torch.nn.Module, args: tuple, output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = output  # (..., T + 1, D)
    return cos[..., :-1, :], sin[..., :-1, :]


def _kinds_of_module(module: torch.nn.Module) -> set[str]:
    """Return the kinds of a rotary embedding, one for each kind of layer; none for any other module."""
    # An attribute of transformers' rotary embeddings: a name, or one per kind of layer.
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return set(kinds.values())
    return {kinds} if isinstance(kinds, str) else set()


def _text(config: PretrainedConfig) -> PretrainedConfig:
    return config.get_text_config()


def _ropes(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Return the rope parameters of a language model: one set, or one for each kind of layer."""
    # Not every config has these; code that comes with a checkpoint may know the older name alone.
    text = _text(config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _limit(rope: Mapping[str, Any], config: PretrainedConfig) -> int:
    return rope.get("original_max_position_embeddings") or _text(config).original_max_position_embeddings
