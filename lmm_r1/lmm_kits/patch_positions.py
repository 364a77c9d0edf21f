"""Patch positions of the vision towers that place patches by their share of the image, exact in any dtype."""

from __future__ import annotations

from typing import Any

import torch


def exact_patch_positions(embeddings: torch.nn.Module) -> None:
    """Make a tower's embeddings place patches as in fp32.

    Transformers rounds the patches' places (0 to 1) to the pixels' dtype before it looks them up: in bf16, of 70 rows and
    as many columns 34 get their neighbour's position, and of 27 rows 6.
    """
    embeddings.register_forward_pre_hook(_pixels_in_fp32, with_kwargs=True)
    embeddings.get_submodule("patch_embedding").register_forward_pre_hook(_pixels_in_the_weights_dtype)


def _pixels_in_fp32(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, kwargs | {"pixel_values": kwargs["pixel_values"].float()}


def _pixels_in_the_weights_dtype(module: torch.nn.Conv2d, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0].to(module.weight.dtype),)
