"""A small random model of the Qwen-VL family with its real special tokens, chat template conventions and processors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BaseImageProcessor,
    BaseVideoProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from lmm_r1.lmm_kits.kit import LmmKit, TinyModelSpec
from lmm_r1.lmm_kits.qwen_vl import BOX_TOKENS
from lmm_r1.lmm_kits.tiny_model import heads_of, save_model, text_settings, train_tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *BOX_TOKENS,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Renders as the released checkpoints do: media in place between vision markers, and first a default system turn.
DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
"""
TURNS = """\
{%- macro media(kind) -%}<|vision_start|><|{{ kind }}_pad|><|vision_end|>{%- endmacro -%}
{%- set seen = namespace(image=0, video=0) -%}
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
VISION_LAYERS = 2
# As the released checkpoints have it for videos and images alike; the class's own default blows small frames up.
VIDEO_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
# Under their names in a config.
MEDIA_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# Half of the head dimension, split over time, height and width in the released models' proportions. The width gets the
# slowest rotations: with so few of them and the usual base of 10,000 they would turn by less than 0.004 a column, and no
# attention could tell the columns of an image apart.
ROPE = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [4, 6, 6]}


def write_tiny(
    kit: LmmKit,
    spec: TinyModelSpec,
    corpus: Iterable[str],
    folder: str | Path,
    *,
    vision_config: Mapping[str, Any],
    text_config: Mapping[str, Any] | None = None,
    chat_template: str = DEFAULT_SYSTEM + TURNS,
    image_processor: BaseImageProcessor | None = None,
    video_processor: BaseVideoProcessor | None = None,
) -> None:
    """Write a random checkpoint of the kit's classes, its processor and chat template to `folder`.

    Args:
        vision_config, text_config: what the kit's configs have beside or instead of the family's.
    """
    tokenizer = train_tokenizer(
        corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
    )
    vision = {
        "depth": VISION_LAYERS,
        "hidden_size": spec.hidden_size,
        "num_heads": heads_of(spec),
        "initializer_range": spec.hidden_size**-0.5,
    }
    config = kit.config_class(
        text_config={**text_settings(spec, tokenizer), "rope_parameters": dict(ROPE), **(text_config or {})},
        vision_config={**vision, **vision_config},
        tie_word_embeddings=spec.tie_embeddings,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in MEDIA_TOKENS.items()},
    )
    processor = kit.processor_class(
        image_processor=image_processor or Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=video_processor or Qwen2VLVideoProcessor(size=dict(VIDEO_PIXELS)),
        chat_template=tokenizer.chat_template,
    )
    torch.manual_seed(spec.seed)
    model = kit.model_class(config)
    save_model(model, tokenizer, folder)
    processor.save_pretrained(folder)
