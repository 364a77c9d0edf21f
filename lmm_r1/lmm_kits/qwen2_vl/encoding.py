"""Qwen2-VL's own classes; messages are encoded as for Qwen2.5-VL, but a step of a video always counts 1 in its positions."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from lmm_r1.lmm_kits.base import load_image_processor
from lmm_r1.lmm_kits.qwen2_5_vl.encoding import media_limits, without_cache


def load_config(path: str, *, trust_remote_code: bool) -> Qwen2VLConfig:
    return Qwen2VLConfig.from_pretrained(path)


def load_model(
    path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
) -> Qwen2VLForConditionalGeneration:
    """Load the model with its generation cache off."""
    return without_cache(
        Qwen2VLForConditionalGeneration.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation, **kwargs
        )
    )


def load_processor(path: str, *, trust_remote_code: bool) -> Qwen2VLProcessor:
    """Load processor and tokenizer; raises UserError when the checkpoint lacks one of them or a chat template."""
    return load_image_processor(path, processor_class=Qwen2VLProcessor)


def engine_arguments(config: Qwen2VLConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
    return media_limits(max_images=max_images, max_videos=max_videos)
