"""Aria: messages to ids and square images of one size with a mask over their padding, and tokens not to be sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AriaConfig, AriaForConditionalGeneration, AriaProcessor, PreTrainedTokenizerBase

from lmm_r1.data.messages import Message, images_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.base import (
    EncodedPrompt,
    Media,
    adds_special_tokens,
    chat_of,
    check_placeholders,
    check_typed_media,
    collapse_runs,
    ids_beyond_tokenizer,
    load_image_processor,
    text_positions,
)

# The chat template writes an image between two tokens that text models use for infilling.
MEDIA_TOKENS = ("<|img|>", "<fim_prefix>", "<fim_suffix>")


def load_config(path: str, *, trust_remote_code: bool) -> AriaConfig:
    return AriaConfig.from_pretrained(path)


def load_model(
    path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
) -> AriaForConditionalGeneration:
    """Load the model with its generation cache off and the patch positions of its vision tower exact in any dtype.

    Raises UserError for a way to compute the experts that transformers does not have for this architecture.
    """
    experts = kwargs.pop("experts_implementation", None)
    if experts not in (None, "eager"):
        raise UserError(
            f"--ds.experts_implementation {experts}: transformers computes this architecture's experts one after the "
            "other only; leave the flag out"
        )
    model = AriaForConditionalGeneration.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, **kwargs
    )
    model.config.use_cache = False
    model.config.text_config.use_cache = False
    # Transformers rounds the patches' places (0 to 1) to the pixels' dtype before it looks them up: in bf16, 34 of the
    # 70 rows and as many columns of a released model's image get their neighbour's position.
    embeddings = model.model.vision_tower.embeddings
    embeddings.register_forward_pre_hook(_pixels_in_fp32, with_kwargs=True)
    embeddings.patch_embedding.register_forward_pre_hook(_pixels_in_the_weights_dtype)
    return model


def _pixels_in_fp32(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, kwargs | {"pixel_values": kwargs["pixel_values"].float()}


def _pixels_in_the_weights_dtype(module: torch.nn.Conv2d, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0].to(module.weight.dtype),)


def load_processor(path: str, *, trust_remote_code: bool) -> AriaProcessor:
    """Load processor and tokenizer; raises UserError when the checkpoint lacks one of them or a chat template."""
    return load_image_processor(path, processor_class=AriaProcessor)


def tokenizer_of(processor: AriaProcessor) -> PreTrainedTokenizerBase:
    return processor.tokenizer


def encode(
    processor: AriaProcessor,
    messages: Sequence[Message],
    *,
    images: Sequence[Image.Image],
    add_generation_prompt: bool,
    videos: Sequence[Video] = (),
) -> EncodedPrompt:
    """Encode a conversation with its images; raises UserError when it holds what the processor cannot take.

    Pixel bounds of an image change nothing: the processor scales the longer side of every image to 980 pixels and pads
    it to a square, and neither it nor vLLM cuts large images into crops, whatever the checkpoint's `split_image` says.
    """
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    if not images:
        token_ids = _ids(processor, text)
        return EncodedPrompt(token_ids=token_ids, engine_token_ids=token_ids, images=[], media=None)
    special = adds_special_tokens(processor.tokenizer, text=text)
    batch = processor(text=[text], images=list(images), add_special_tokens=special, return_tensors="pt")
    token_ids = batch["input_ids"][0].tolist()
    return EncodedPrompt(
        token_ids=token_ids,
        engine_token_ids=collapse_runs(token_ids, placeholders=placeholder_ids(processor)),
        images=list(images),
        media={"pixel_values": batch["pixel_values"], "pixel_mask": batch["pixel_mask"]},
    )


def render(processor: AriaProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
    """Return the ids of a conversation with one placeholder per image, without reading the images."""
    return _ids(processor, _render_text(processor, messages, add_generation_prompt=add_generation_prompt))


def _ids(processor: AriaProcessor, text: str) -> list[int]:
    special = adds_special_tokens(processor.tokenizer, text=text)
    return processor.tokenizer(text, add_special_tokens=special)["input_ids"]


def _render_text(processor: AriaProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    check_typed_media(messages, media_tokens=MEDIA_TOKENS)
    text = processor.apply_chat_template(
        chat_of(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    check_placeholders(text.count(processor.image_token), given=len(images_of(messages)), kind="images")
    return text


def placeholder_ids(processor: AriaProcessor) -> frozenset[int]:
    return frozenset({processor.image_token_id})


def engine_arguments(config: AriaConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
    return {"limit_mm_per_prompt": {"image": max_images}}


def banned_token_ids(config: AriaConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of all media tokens and of the vocabulary's padding."""
    media = [tokenizer.convert_tokens_to_ids(token) for token in MEDIA_TOKENS]
    known = [token for token in media if token is not None and token != tokenizer.unk_token_id]
    return tuple(sorted({config.image_token_id, *known, *ids_beyond_tokenizer(config, tokenizer)}))


def forward_inputs(
    config: AriaConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
) -> dict[str, torch.Tensor]:
    """Return positions (B, T) and the media tensors for a padded batch (B, T)."""
    return {"position_ids": text_positions(attention_mask), **(media or {})}


def filler_media(config: AriaConfig) -> tuple[list[int], Media]:
    """Return the smaller of the two legal images, in black, with its placeholders."""
    patches = min(config.projector_patch_to_query_dict)
    side = math.isqrt(patches) * config.vision_config.patch_size
    media = {
        "pixel_values": torch.zeros(1, config.vision_config.num_channels, side, side),
        "pixel_mask": torch.ones(1, side, side, dtype=torch.bool),
    }
    return [config.image_token_id] * config.projector_patch_to_query_dict[patches], media


def save_processor(processor: AriaProcessor, folder: str | Path) -> None:
    processor.save_pretrained(folder)
