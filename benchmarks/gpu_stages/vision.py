"""The ways in which the installed code can run a vision tower's attention over windows and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lmm_r1.lmm_kits import LmmKit
from lmm_r1.models.loading import multiply_patches
from lmm_r1.models.packed.attention import PACKED_ATTENTION
from lmm_r1.models.packed.varlen_kernel import join_windows

VisionWay: TypeAlias = Callable[[PreTrainedModel], None]
"""Switches a loaded model's vision tower to it, and leaves its text tower as it is."""

LOOP = "loop"
# Implementations of ours that are registered with transformers, whatever they are called behind it.
PREFIX = "lmm_"


def prepare_tower(model: PreTrainedModel, kit: LmmKit) -> None:
    """Do to a vision tower what `lmm_r1.models.loading` does to it for training; what it does more belongs here, too."""
    multiply_patches(model)
    join_windows(model, kit)


def vision_ways() -> Mapping[str, VisionWay]:
    """Return the ways by name; a switch that is no name of an attention implementation is added here, in one line.

    `loop` is a call of PyTorch's SDPA per window and image; the others take all of them in one call.
    """
    ways: dict[str, VisionWay] = {LOOP: partial(set_vision_attention, name="sdpa")}
    if _has_flash_attn():
        ways["flash_attn"] = partial(set_vision_attention, name="flash_attention_2")
    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        if name.startswith(PREFIX) and name != PACKED_ATTENTION:
            ways[name.removeprefix(PREFIX)] = partial(set_vision_attention, name=name)
    return ways


def set_vision_attention(model: PreTrainedModel, *, name: str) -> None:
    """Let all towers but the text's use an attention implementation by transformers' name."""
    text = model.config.get_text_config()
    inner = {key: getattr(model.config, key) for key in model.config.sub_configs}
    names = {"": model.config._attn_implementation}
    names |= {
        key: config._attn_implementation if config is text else name
        for key, config in inner.items()
        if config is not None
    }
    model.set_attn_implementation(names)


def _has_flash_attn() -> bool:
    try:
        import flash_attn_2_cuda  # noqa: F401  # the compiled part; the stand-in in compat/ has none
    except ImportError:
        return False
    return True
