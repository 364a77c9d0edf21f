"""Qwen2.5-VL: messages to ids and pixel patches, M-RoPE positions, and the tokens that may not be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from lmm_r1.data.messages import Message, TextPart, images_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.base import (
    EncodedPrompt,
    Media,
    bounded_size,
    chat_of,
    check_chat,
    collapse_runs,
    ids_beyond_tokenizer,
    text_positions,
)

# Either name holds the image processor's settings; transformers 5 writes the first.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MEDIA_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def load_config(path: str, *, trust_remote_code: bool) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig.from_pretrained(path)


def load_model(
    path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
) -> Qwen2_5_VLForConditionalGeneration:
    """Load the model with its generation cache off.

    The inner config is the one that counts: a cache would also switch off the detection of packed rows.
    """
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, **kwargs
    )
    model.config.use_cache = False
    model.config.text_config.use_cache = False
    return model


def load_processor(path: str, *, trust_remote_code: bool) -> Qwen2_5_VLProcessor:
    """Load processor and tokenizer; raises UserError when the checkpoint lacks one of them or a chat template."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise UserError(
            f"{path}: no image processor in this checkpoint; copy {' or '.join(PROCESSOR_FILES)} of the original model "
            "into it"
        )
    try:
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: the image processor or the tokenizer of this checkpoint cannot be loaded ({error}); copy "
            f"{' or '.join(PROCESSOR_FILES)}, the tokenizer files and the chat template of the original model into it"
        ) from error
    if not isinstance(processor, Qwen2_5_VLProcessor):
        raise UserError(
            f"{path}: this checkpoint has a tokenizer but no image processor; copy {' or '.join(PROCESSOR_FILES)} "
            "of the original model into it"
        )
    check_chat(processor, tokenizer=processor.tokenizer, path=path)
    return processor


def tokenizer_of(processor: Qwen2_5_VLProcessor) -> PreTrainedTokenizerBase:
    return processor.tokenizer


def encode(
    processor: Qwen2_5_VLProcessor,
    messages: Sequence[Message],
    *,
    images: Sequence[Image.Image],
    add_generation_prompt: bool,
    videos: Sequence[Video] = (),
) -> EncodedPrompt:
    """Encode a conversation with its images; raises UserError when it holds what the processor cannot take."""
    resized = [
        _within_bounds(processor, image, part.min_pixels, part.max_pixels)
        for image, part in zip(images, images_of(messages), strict=True)
    ]
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    if not resized:
        token_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return EncodedPrompt(token_ids=token_ids, engine_token_ids=token_ids, images=[], media=None)
    try:
        batch = processor(text=[text], images=resized, add_special_tokens=False, return_tensors="pt")
    except ValueError as error:
        sizes = ", ".join(f"{image.width}x{image.height}" for image in resized)
        raise UserError(f"the image processor refuses the images ({sizes}): {error}; take the row out") from error
    token_ids = batch["input_ids"][0].tolist()
    return EncodedPrompt(
        token_ids=token_ids,
        engine_token_ids=collapse_runs(token_ids, placeholders=placeholder_ids(processor)),
        images=resized,
        media={"pixel_values": batch["pixel_values"], "image_grid_thw": batch["image_grid_thw"]},
    )


def render(processor: Qwen2_5_VLProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
    """Return the ids of a conversation with one placeholder per image, without reading the images."""
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def _render_text(processor: Qwen2_5_VLProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    for message in messages:
        for part in message.parts:
            typed = [token for token in MEDIA_TOKENS if isinstance(part, TextPart) and token in part.text]
            if typed:
                raise UserError(f"the text of a message holds the media token {typed[0]}; take it out of the row")
    text = processor.apply_chat_template(
        chat_of(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    written, given = text.count(processor.image_token), len(images_of(messages))
    if written != given:
        raise UserError(
            f"the checkpoint's chat template writes {written} placeholders for the {given} images of a row"
        )
    return text


def placeholder_ids(processor: Qwen2_5_VLProcessor) -> frozenset[int]:
    return frozenset({processor.image_token_id, processor.video_token_id})


def _within_bounds(
    processor: Qwen2_5_VLProcessor, image: Image.Image, min_pixels: int | None, max_pixels: int | None
) -> Image.Image:
    """Resize an image to its own pixel bounds, as far as the processor's own bounds leave room for them.

    Done before both the training and the rollout side see it, so that both cut it into the same patches.
    """
    if min_pixels is None and max_pixels is None:
        return image
    image_processor = processor.image_processor
    lowest, highest = image_processor.size["shortest_edge"], image_processor.size["longest_edge"]
    highest = min(highest, max_pixels or highest)
    height, width = bounded_size(
        height=image.height,
        width=image.width,
        factor=image_processor.patch_size * image_processor.merge_size,
        min_pixels=min(max(lowest, min_pixels or lowest), highest),
        max_pixels=highest,
    )
    return image.resize((width, height), Image.Resampling.BICUBIC)


def engine_arguments(config: Qwen2_5_VLConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
    return {"limit_mm_per_prompt": {"image": max_images, "video": max_videos}}


def banned_token_ids(config: Qwen2_5_VLConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of all media tokens and of the vocabulary's padding."""
    media = [tokenizer.convert_tokens_to_ids(token) for token in MEDIA_TOKENS]
    known = [
        config.image_token_id,
        config.video_token_id,
        config.vision_start_token_id,
        config.vision_end_token_id,
        *(token for token in media if token is not None and token != tokenizer.unk_token_id),
    ]
    return tuple(sorted({*known, *ids_beyond_tokenizer(config, tokenizer)}))


def forward_inputs(
    config: Qwen2_5_VLConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
) -> dict[str, torch.Tensor]:
    """Return M-RoPE positions (3, B, T) and the media tensors for a padded batch (B, T).

    The positions are always given: a model that infers them keeps `rope_deltas` of an earlier batch.
    """
    if media is None:
        positions = text_positions(attention_mask)
        return {"position_ids": positions.expand(3, *positions.shape)}
    types = (sequences == config.image_token_id).to(torch.int32)
    positions, _ = Qwen2_5_VLModel.get_rope_index(
        _position_source(config),
        sequences,
        mm_token_type_ids=types,
        image_grid_thw=media["image_grid_thw"],
        attention_mask=attention_mask,
    )
    # (sequences.device, so that the caller need not know where the positions were computed)
    return {"position_ids": positions.to(sequences.device), "mm_token_type_ids": types, **media}


def _position_source(config: Qwen2_5_VLConfig) -> SimpleNamespace:
    """Return what `get_rope_index` reads of the model: its config and one helper; no weights."""
    source = SimpleNamespace(config=config)
    source.get_vision_position_ids = partial(Qwen2_5_VLModel.get_vision_position_ids, source)
    return source


def filler_media(config: Qwen2_5_VLConfig) -> tuple[list[int], Media]:
    """Return the smallest legal image sample: one merged patch of zeros between its two markers."""
    vision = config.vision_config
    patches = vision.spatial_merge_size**2
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    media = {
        "pixel_values": torch.zeros(patches, width),
        "image_grid_thw": torch.tensor([[1, vision.spatial_merge_size, vision.spatial_merge_size]]),
    }
    return [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id], media


def save_processor(processor: Qwen2_5_VLProcessor, folder: str | Path) -> None:
    processor.save_pretrained(folder)
