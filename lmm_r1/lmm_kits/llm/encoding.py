"""Plain language models: messages to ids, and what the forward pass takes beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lmm_r1.data.messages import Message
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.base import EncodedPrompt, Media, check_chat, ids_beyond_tokenizer, text_positions


def load_config(path: str, *, trust_remote_code: bool) -> PretrainedConfig:
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_model(
    path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
) -> PreTrainedModel:
    """Load the model with its generation cache off."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, **kwargs
    )
    model.config.use_cache = False
    return model


def load_processor(path: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer; raises UserError when the folder has none or it has no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no tokenizer can be loaded from this checkpoint ({error})") from error
    check_chat(tokenizer, tokenizer=tokenizer, path=path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_of(processor: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    return processor


def encode(
    processor: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    images: Sequence[Image.Image],
    add_generation_prompt: bool,
    videos: Sequence[Video] = (),
) -> EncodedPrompt:
    """Encode a text conversation; raises UserError when it holds an image or a video."""
    if images or videos:
        given = f"{len(images)} image(s)" if images else f"{len(videos)} video(s)"
        raise UserError(f"a plain language model cannot take the {given} of this row")
    token_ids = render(processor, messages, add_generation_prompt=add_generation_prompt)
    return EncodedPrompt(token_ids=token_ids, engine_token_ids=token_ids, images=[], media=None)


def render(
    processor: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
) -> list[int]:
    """Return the ids of a conversation in the chat template's form."""
    # Chat templates of language models take text only; a list of text parts is joined as vLLM's server joins it.
    chat = [{"role": turn.role, "content": "\n".join(part.text for part in turn.parts)} for turn in messages]
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    return processor(text, add_special_tokens=False)["input_ids"]


def placeholder_ids(processor: PreTrainedTokenizerBase) -> frozenset[int]:
    return frozenset()


def engine_arguments(config: PretrainedConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
    return {}


def backbone_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return what stands under the output layer; its name differs between architectures."""
    return model.base_model


def banned_token_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return ids_beyond_tokenizer(config, tokenizer)


def forward_inputs(
    config: PretrainedConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
) -> dict[str, torch.Tensor]:
    assert media is None, "a plain language model got media tensors"
    return {"position_ids": text_positions(attention_mask)}


def save_processor(processor: PreTrainedTokenizerBase, folder: str | Path) -> None:
    processor.save_pretrained(folder)
