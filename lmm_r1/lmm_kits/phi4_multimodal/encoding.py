"""Phi-4-multimodal: messages to ids and crops, positions, and the tokens that may not be sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Phi4MultimodalConfig, Phi4MultimodalProcessor, PreTrainedTokenizerBase

from lmm_r1.data.messages import ImagePart, Message, images_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.base import (
    EncodedPrompt,
    Media,
    bounded_size,
    check_placeholders,
    check_typed_media,
    cut_tokens,
    ids_beyond_tokenizer,
    text_positions,
)

MEDIA_KEYS = ("image_pixel_values", "image_sizes", "image_attention_mask")


def encode(
    processor: Phi4MultimodalProcessor,
    messages: Sequence[Message],
    *,
    images: Sequence[Image.Image],
    add_generation_prompt: bool,
    videos: Sequence[Video] = (),
) -> EncodedPrompt:
    """Encode a conversation with its images; raises UserError when it holds what the processor cannot take."""
    if videos:
        raise UserError(f"this model cannot take the {len(videos)} video(s) of this row")
    resized = [
        _within_bounds(processor, image, part.min_pixels, part.max_pixels)
        for image, part in zip(images, images_of(messages), strict=True)
    ]
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    # Not the runs of `token_ids` collapsed: images may stand side by side, and their placeholders are all alike.
    engine_token_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not resized:
        return EncodedPrompt(token_ids=engine_token_ids, engine_token_ids=engine_token_ids, images=[], media=None)
    try:
        batch = processor(text=[text], images=resized, add_special_tokens=False, return_tensors="pt")
    except ValueError as error:
        sizes = ", ".join(f"{image.width}x{image.height}" for image in resized)
        raise UserError(f"the image processor refuses the images ({sizes}): {error}; take the row out") from error
    return EncodedPrompt(
        token_ids=batch["input_ids"][0].tolist(),
        engine_token_ids=engine_token_ids,
        images=resized,
        media={key: batch[key] for key in MEDIA_KEYS},
    )


def render(
    processor: Phi4MultimodalProcessor, messages: Sequence[Message], *, add_generation_prompt: bool
) -> list[int]:
    """Return the ids of a conversation with one placeholder per image, without reading the images."""
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def _render_text(
    processor: Phi4MultimodalProcessor, messages: Sequence[Message], *, add_generation_prompt: bool
) -> str:
    check_typed_media(messages, media_tokens=(processor.image_token, processor.audio_token))
    # The original release's template takes texts only, so the images are written into them here.
    chat = [
        {
            "role": message.role,
            "content": "".join(
                processor.image_token if isinstance(part, ImagePart) else part.text for part in message.parts
            ),
        }
        for message in messages
    ]
    # That template also puts the end token behind a finished conversation, where it is never sampled.
    text = processor.tokenizer.apply_chat_template(
        chat,
        chat_template=processor.chat_template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        eos_token="",
    )
    check_placeholders(text.count(processor.image_token), given=len(images_of(messages)), kind="images")
    return text


def placeholder_ids(processor: Phi4MultimodalProcessor) -> frozenset[int]:
    return frozenset({processor.image_token_id})


def _within_bounds(
    processor: Phi4MultimodalProcessor, image: Image.Image, min_pixels: int | None, max_pixels: int | None
) -> Image.Image:
    """Resize an image to its own pixel bounds, before the processor scales it up to whole crops of 448 pixels.

    Fewer pixels mean fewer crops, down to one; more than the processor's largest number of crops holds are no use.
    """
    if min_pixels is None and max_pixels is None:
        return image
    image_processor = processor.image_processor
    most = image_processor.dynamic_hd * image_processor.size["height"] * image_processor.size["width"]
    highest = min(most, max_pixels or most)
    height, width = bounded_size(
        height=image.height,
        width=image.width,
        factor=1,
        min_pixels=min(min_pixels or 1, highest),
        max_pixels=highest,
    )
    return image.resize((width, height), Image.Resampling.BICUBIC)


def engine_arguments(config: Phi4MultimodalConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
    return {"limit_mm_per_prompt": {"image": max_images}}


def banned_token_ids(config: Phi4MultimodalConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of the image and the audio token and of the vocabulary's padding."""
    media = (config.vision_config.image_token_id, config.audio_config.audio_token_id)
    return tuple(sorted({*media, *ids_beyond_tokenizer(config, tokenizer)}))


def forward_inputs(
    config: Phi4MultimodalConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
) -> dict[str, torch.Tensor]:
    """Return positions (B, T) and the media tensors for a padded batch (B, T)."""
    return {"position_ids": text_positions(attention_mask), **(media or {})}


def cut_inputs(language_model: torch.nn.Module, inputs: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
    """Return the inputs for some tokens; the model would merge images into all embeddings, which is done here."""
    ids, images = inputs["input_ids"], {name: inputs.get(name) for name in MEDIA_KEYS}
    embeds = language_model.embed_tokens_extend(ids, language_model.embed_tokens(ids), **images)
    merged = {**inputs, **dict.fromkeys(("input_ids", *MEDIA_KEYS)), "inputs_embeds": embeds}
    return cut_tokens(language_model, merged, tokens)


def save_processor(processor: Phi4MultimodalProcessor, folder: str | Path) -> None:
    processor.save_pretrained(folder)
