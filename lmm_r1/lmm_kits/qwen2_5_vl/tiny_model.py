"""A small random Qwen2.5-VL with its real special tokens, chat template conventions and image processor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from lmm_r1.lmm_kits.base import TinyModelSpec
from lmm_r1.lmm_kits.tiny_tokenizer import train_tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Renders as the released checkpoints do: a default system turn, and images in place between vision markers.
CHAT_TEMPLATE = """\
{%- macro media(kind) -%}<|vision_start|><|{{ kind }}_pad|><|vision_end|>{%- endmacro -%}
{%- set seen = namespace(image=0, video=0) -%}
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') or 'image' in part -%}
{%- set seen.image = seen.image + 1 -%}
{%- if add_vision_id -%}{{- 'Picture ' + seen.image|string + ': ' -}}{%- endif -%}
{{- media('image') -}}
{%- elif part.type == 'video' or 'video' in part -%}
{%- set seen.video = seen.video + 1 -%}
{%- if add_vision_id -%}{{- 'Video ' + seen.video|string + ': ' -}}{%- endif -%}
{{- media('video') -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
ORDINARY_TOKENS = 384
HEAD_DIM = 32  # vLLM's CPU attention takes no smaller one.
VISION_LAYERS = 2


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    tokenizer = train_tokenizer(
        tokenizer_corpus,
        vocab_size=ORDINARY_TOKENS,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    config = _config(spec, {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}, len(tokenizer))
    torch.manual_seed(spec.seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)


def _config(spec: TinyModelSpec, ids: dict[str, int], vocab_size: int) -> Qwen2_5_VLConfig:
    heads = max(2, spec.hidden_size // HEAD_DIM)
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": 4 * spec.hidden_size,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": 32768,
            # The released models' 0.02 suits their width; a narrow model starts learning sooner at 1 / sqrt(width).
            "initializer_range": spec.hidden_size**-0.5,
            # Half of the head dimension, split over time, height and width in the released models' proportions.
            # The width gets the slowest rotations: with so few of them and the usual base of 10,000 they would turn
            # by less than 0.004 a column, and no attention could tell the columns of an image apart.
            "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": spec.tie_embeddings,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": VISION_LAYERS,
            "hidden_size": spec.hidden_size,
            "intermediate_size": 2 * spec.hidden_size,
            "num_heads": heads,
            "out_hidden_size": spec.hidden_size,
            "fullatt_block_indexes": [VISION_LAYERS - 1],
            "initializer_range": spec.hidden_size**-0.5,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=spec.tie_embeddings,
    )
