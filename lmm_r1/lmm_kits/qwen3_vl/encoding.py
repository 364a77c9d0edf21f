"""Qwen3-VL's own classes, and its videos: each step of one is a run of placeholders of its own behind its time as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from lmm_r1.data.messages import Message, videos_of
from lmm_r1.data.videos import Video
from lmm_r1.lmm_kits.base import EncodedPrompt, cut_tokens, load_image_processor
from lmm_r1.lmm_kits.qwen2_5_vl.encoding import encode_bounded, media_limits, without_cache
from lmm_r1.lmm_kits.qwen2_5_vl.frames import bounded_video

FRAMES_A_STEP = 2


def load_config(path: str, *, trust_remote_code: bool) -> Qwen3VLConfig:
    return Qwen3VLConfig.from_pretrained(path)


def load_model(
    path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
) -> Qwen3VLForConditionalGeneration:
    """Load the model with its generation cache off."""
    return without_cache(
        Qwen3VLForConditionalGeneration.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation, **kwargs
        )
    )


def load_processor(path: str, *, trust_remote_code: bool) -> Qwen3VLProcessor:
    """Load processor and tokenizer; raises UserError when the checkpoint lacks one of them or a chat template."""
    return load_image_processor(path, processor_class=Qwen3VLProcessor)


def encode(
    processor: Qwen3VLProcessor,
    messages: Sequence[Message],
    *,
    images: Sequence[Image.Image],
    add_generation_prompt: bool,
    videos: Sequence[Video] = (),
) -> EncodedPrompt:
    """Encode a conversation with its media; raises UserError when it holds what the processor cannot take."""
    bounded = []
    for video, part in zip(videos, videos_of(messages), strict=True):
        if len(video.frames) < FRAMES_A_STEP:
            # The processor refuses a lone frame.
            video = replace(video, frames=np.repeat(video.frames, FRAMES_A_STEP, axis=0))
        bounded.append(
            bounded_video(
                processor,
                video,
                min_pixels=part.min_pixels,
                max_pixels=part.max_pixels,
                # Its bounds are for all frames of a video together, their number rounded to whole steps.
                frames_together=round(len(video.frames) / FRAMES_A_STEP) * FRAMES_A_STEP,
            )
        )
    return encode_bounded(
        processor, messages, images=images, videos=bounded, add_generation_prompt=add_generation_prompt
    )


def engine_arguments(config: Qwen3VLConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
    """Return vLLM's limits, and a name for the language model alone.

    vLLM 0.29's CPU platform looks that name up and fails where there is none (platforms/cpu.py asks for `use_mla`).
    """
    limits = media_limits(max_images=max_images, max_videos=max_videos)
    return {**limits, "hf_overrides": {"text_config": {"architectures": ["Qwen3ForCausalLM"]}}}


def cut_inputs(language_model: torch.nn.Module, inputs: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
    """Return the language model's inputs for some tokens, with what its first layers add to those of images (V, H)."""
    cut = cut_tokens(language_model, inputs, tokens)
    visual = inputs["visual_pos_masks"]  # (1, T)
    if visual is None:
        return cut
    before, inside = int(visual[:, : tokens.start].sum()), int(visual[:, tokens].sum())
    added = [embeds[before : before + inside] for embeds in inputs["deepstack_visual_embeds"]]
    return {**cut, "visual_pos_masks": visual[:, tokens], "deepstack_visual_embeds": added}
