"""A small random InternVL3 with its real special tokens, chat template conventions and processors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerBase,
)

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.tiny_model import heads_of, save_model, text_settings, train_tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<quad>",
    "</quad>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
    "<video>",
)
NAMED_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
# Renders as the released checkpoints do: no default system turn, a line break behind each image.
CHAT_TEMPLATE = """\
{%- for turn in messages -%}
{{- '<|im_start|>' + turn.role + '\\n' -}}
{%- if turn.content is string -%}
{{- turn.content -}}
{%- else -%}
{%- for part in turn.content -%}
{%- if part.type == 'text' -%}
{{- part.text -}}
{%- else -%}
{{- {'image': '<IMG_CONTEXT>', 'video': '<video>'}[part.type] + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
VISION_LAYERS = 2
# 4 x 4 patches in a tile, of which each 2 x 2 become one placeholder; 32 x 32 and 256 placeholders in the releases.
TILE_SIDE, PATCH_SIZE, TILE_TOKENS = 56, 14, 4
# 12 in the releases.
MAX_TILES = 4
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    trained = train_tokenizer(
        tokenizer_corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    # Loaded again, as the image tokens get their names in the tokenizer on loading.
    trained.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=NAMED_TOKENS)
    torch.manual_seed(spec.seed)
    model = InternVLForConditionalGeneration(_config(spec, tokenizer))
    save_model(model, tokenizer, folder)
    size = {"height": TILE_SIDE, "width": TILE_SIDE}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, max_patches=MAX_TILES, image_mean=MEAN, image_std=STD),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size, image_mean=MEAN, image_std=STD),
        image_seq_length=TILE_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)


def _config(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> InternVLConfig:
    return InternVLConfig(
        text_config={**text_settings(spec, tokenizer), "model_type": "qwen2"},
        vision_config={
            "hidden_size": spec.hidden_size,
            "intermediate_size": 2 * spec.hidden_size,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": heads_of(spec),
            "attention_bias": True,
            "image_size": [TILE_SIDE, TILE_SIDE],
            "patch_size": [PATCH_SIZE, PATCH_SIZE],
            "initializer_range": spec.hidden_size**-0.5,
        },
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=TILE_TOKENS,
        tie_word_embeddings=spec.tie_embeddings,
    )
