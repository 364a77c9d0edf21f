"""Phi-3.5-vision: messages to ids and crops, and the tokens that may not be sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from lmm_r1.data.messages import Message, TextPart, images_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.base import (
    EncodedPrompt,
    Media,
    chat_of,
    check_placeholders,
    check_typed_media,
    collapse_runs,
    cut_tokens,
    ids_beyond_tokenizer,
    load_image_processor,
    text_positions,
)
from lmm_r1.lmm_kits.phi3_v.configuration import Phi3VConfig
from lmm_r1.lmm_kits.phi3_v.image_processing import CROP, tokens_of_grid
from lmm_r1.lmm_kits.phi3_v.modeling import Phi3VForCausalLM, Phi3VModel
from lmm_r1.lmm_kits.phi3_v.processing import IMAGE_TAG, IMAGE_TOKEN, Phi3VProcessor

END_TOKEN = "<|end|>"


def load_config(path: str, *, trust_remote_code: bool) -> Phi3VConfig:
    return Phi3VConfig.from_pretrained(path)


def load_model(
    path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
) -> Phi3VForCausalLM:
    """Load the model with its generation cache off; raises UserError where the checkpoint lacks some of its weights."""
    model, report = Phi3VForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, output_loading_info=True, **kwargs
    )
    # A critic's checkpoint has no output layer, and names its value head.
    absent = {"lm_head.weight"} if hasattr(model.config, "value_head_prefix") else set()
    missing = sorted(set(report["missing_keys"]) - absent)
    if missing:
        raise UserError(
            f"{path}: {len(missing)} weights are not in this checkpoint, {missing[0]} among them; copy the original "
            "model's weight files into it"
        )
    model.config.use_cache = False
    return model


def load_processor(path: str, *, trust_remote_code: bool) -> Phi3VProcessor:
    """Load processor and tokenizer; raises UserError when the checkpoint lacks one of them, a token or a chat template.

    The end token becomes `<|end|>`, with which the chat template ends a turn; the release names `<|endoftext|>`.
    """
    processor = load_image_processor(path, processor_class=Phi3VProcessor)
    tokenizer = processor.tokenizer
    lacking = {IMAGE_TOKEN, END_TOKEN} - tokenizer.get_vocab().keys()
    if lacking:
        raise UserError(
            f"{path}: the tokenizer of this checkpoint has no {' and no '.join(sorted(lacking))}; copy the original "
            "model's tokenizer files into it"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.eos_token = END_TOKEN
    return processor


def tokenizer_of(processor: Phi3VProcessor) -> PreTrainedTokenizerBase:
    return processor.tokenizer


def encode(
    processor: Phi3VProcessor,
    messages: Sequence[Message],
    *,
    images: Sequence[Image.Image],
    add_generation_prompt: bool,
    videos: Sequence[Video] = (),
) -> EncodedPrompt:
    """Encode a conversation with its images; raises UserError when it holds what the processor cannot take.

    Pixel bounds of an image change nothing: every image, small or large, is scaled to as many crops as the processor's
    `num_crops` allows for its aspect ratio.
    """
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    if not images:
        token_ids = processor.token_ids(text, counts=[])
        return EncodedPrompt(token_ids=token_ids, engine_token_ids=token_ids, images=[], media=None)
    try:
        batch = processor(text=[text], images=list(images), return_tensors="pt")
    except ValueError as error:
        sizes = ", ".join(f"{image.width}x{image.height}" for image in images)
        raise UserError(f"the image processor refuses the images ({sizes}): {error}; take the row out") from error
    token_ids = batch["input_ids"][0].tolist()
    return EncodedPrompt(
        token_ids=token_ids,
        engine_token_ids=collapse_runs(token_ids, placeholders=placeholder_ids(processor)),
        images=list(images),
        media={"pixel_values": batch["pixel_values"], "image_sizes": batch["image_sizes"]},
    )


def render(processor: Phi3VProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
    """Return the ids of a conversation with one placeholder per image, without reading the images."""
    text = _render_text(processor, messages, add_generation_prompt=add_generation_prompt)
    return processor.token_ids(text, counts=[1] * len(images_of(messages)))


def _render_text(processor: Phi3VProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    # The tags that stand for images are no tokens but plain text, so any number of them can be typed.
    typed = {
        tag.group()
        for message in messages
        for part in message.parts
        if isinstance(part, TextPart)
        for tag in IMAGE_TAG.finditer(part.text)
    }
    check_typed_media(messages, media_tokens=(IMAGE_TOKEN, *sorted(typed)))
    text = processor.apply_chat_template(
        chat_of(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    check_placeholders(len(IMAGE_TAG.findall(text)), given=len(images_of(messages)), kind="images")
    return text


def placeholder_ids(processor: Phi3VProcessor) -> frozenset[int]:
    return frozenset({processor.image_token_id})


def engine_arguments(config: Phi3VConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
    return {"limit_mm_per_prompt": {"image": max_images}}


def banned_token_ids(config: Phi3VConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the placeholder's id and those of the vocabulary's padding.

    A sampled `<|image_1|>` is ordinary text to the model and cannot be banned; it matters only where it comes back in a
    later prompt, which is then refused.
    """
    known = {config.image_token_id, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)}
    return tuple(sorted(known | set(ids_beyond_tokenizer(config, tokenizer))))


def forward_inputs(
    config: Phi3VConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
) -> dict[str, torch.Tensor]:
    """Return positions (B, T) and the media tensors for a padded batch (B, T)."""
    return {"position_ids": text_positions(attention_mask), **(media or {})}


def filler_media(config: Phi3VConfig) -> tuple[list[int], Media]:
    """Return an image of a single crop, in grey, with its placeholders."""
    media = {"pixel_values": torch.zeros(1, 2, 3, CROP, CROP), "image_sizes": torch.tensor([[CROP, CROP]])}
    tokens = tokens_of_grid(1, 1, crop_tokens=config.img_processor["num_img_tokens"])
    return [config.image_token_id] * tokens, media


def cut_inputs(language_model: Phi3VModel, inputs: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
    """Return the inputs for some tokens; the model would merge images into all embeddings, which is done here."""
    if inputs.get("pixel_values") is None:
        return cut_tokens(language_model, inputs, tokens)
    embeds = language_model.with_images(inputs["input_ids"], inputs["pixel_values"], inputs["image_sizes"])
    merged = {**inputs, **dict.fromkeys(("input_ids", "pixel_values", "image_sizes")), "inputs_embeds": embeds}
    return cut_tokens(language_model, merged, tokens)


def save_processor(processor: Phi3VProcessor, folder: str | Path) -> None:
    processor.save_pretrained(folder)
