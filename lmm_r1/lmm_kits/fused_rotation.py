"""Liger's kernel for rotary embeddings of three axes, which it names after one architecture."""

from __future__ import annotations

from typing import Any

import torch


def rotate_by_sections(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sections: list[int]
) -> Any:
    """Return queries and keys (B, H, T, D), rotated by angles (3, B, T, D) of which each axis has its section."""
    from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction

    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, sections)
