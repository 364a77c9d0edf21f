"""Janus: messages to ids and square images with a fixed number of placeholders, and tokens not to be sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import JanusConfig, JanusForConditionalGeneration, JanusProcessor, PreTrainedTokenizerBase

from lmm_r1.data.messages import Message, images_of
from lmm_r1.data.videos import Video
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


def load_config(path: str, *, trust_remote_code: bool) -> JanusConfig:
    return JanusConfig.from_pretrained(path)


def load_model(
    path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
) -> JanusForConditionalGeneration:
    """Load the model with its generation cache off."""
    model = JanusForConditionalGeneration.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, **kwargs
    )
    model.config.use_cache = False
    model.config.text_config.use_cache = False
    return model


def load_processor(path: str, *, trust_remote_code: bool) -> JanusProcessor:
    """Load processor and tokenizer; raises UserError when the checkpoint lacks one of them or a chat template."""
    return load_image_processor(path, processor_class=JanusProcessor)


def tokenizer_of(processor: JanusProcessor) -> PreTrainedTokenizerBase:
    return processor.tokenizer


def encode(
    processor: JanusProcessor,
    messages: Sequence[Message],
    *,
    images: Sequence[Image.Image],
    add_generation_prompt: bool,
    videos: Sequence[Video] = (),
) -> EncodedPrompt:
    """Encode a conversation with its images; raises UserError when it holds what the processor cannot take.

    Pixel bounds of an image change nothing: the processor scales and pads every image to one square.
    """
    if not images:
        token_ids = render(processor, messages, add_generation_prompt=add_generation_prompt)
        return EncodedPrompt(token_ids=token_ids, engine_token_ids=token_ids, images=[], media=None)
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    batch = _call(processor, text, images=list(images))
    token_ids = batch["input_ids"][0].tolist()
    return EncodedPrompt(
        token_ids=token_ids,
        engine_token_ids=collapse_runs(token_ids, placeholders=placeholder_ids(processor)),
        images=list(images),
        media={"pixel_values": batch["pixel_values"]},
    )


def render(processor: JanusProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
    """Return the ids of a conversation with one placeholder per image, without reading the images."""
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    image = f"{processor.image_start_token}{processor.image_token}{processor.image_end_token}"
    return _call(processor, text.replace(processor.image_token, image))["input_ids"][0].tolist()


def _call(processor: JanusProcessor, text: str, **images: list[Image.Image]) -> Mapping[str, torch.Tensor]:
    # The processor puts the default system prompt before the text, and the tokenizer the start token before both.
    special = adds_special_tokens(processor.tokenizer, text=text)
    return processor(text=[text], add_special_tokens=special, return_tensors="pt", **images)


def _render_text(processor: JanusProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    check_typed_media(messages, media_tokens=_media_tokens(processor.tokenizer))
    text = processor.apply_chat_template(
        _parts_of(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    check_placeholders(text.count(processor.image_token), given=len(images_of(messages)), kind="images")
    end = processor.tokenizer.eos_token
    # The template leaves the last turn open. A finished answer ends as it does where more messages follow.
    if not add_generation_prompt and messages[-1].role == "assistant" and not text.endswith(end):
        text += end
    return text


def _parts_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as lists of parts: the released chat template writes nothing for a message that is a string."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in map(dict, chat_of(messages))
    ]


def _media_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    return tokenizer.image_token, tokenizer.boi_token, tokenizer.eoi_token


def placeholder_ids(processor: JanusProcessor) -> frozenset[int]:
    return frozenset({processor.tokenizer.convert_tokens_to_ids(processor.image_token)})


def engine_arguments(config: JanusConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
    return {}


def banned_token_ids(config: JanusConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of all media tokens and of the vocabulary's padding."""
    media = tokenizer.convert_tokens_to_ids(_media_tokens(tokenizer))
    return tuple(sorted({config.image_token_id, *media, *ids_beyond_tokenizer(config, tokenizer)}))


def forward_inputs(
    config: JanusConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
) -> dict[str, torch.Tensor]:
    """Return positions (B, T) and the media tensors for a padded batch (B, T)."""
    return {"position_ids": text_positions(attention_mask), **(media or {})}


def filler_media(config: JanusConfig) -> tuple[list[int], Media]:
    """Return a black image, all of which are of one size, with its placeholders."""
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    media = {"pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)}
    return [config.image_token_id] * patches, media


def save_processor(processor: JanusProcessor, folder: str | Path) -> None:
    processor.save_pretrained(folder)
