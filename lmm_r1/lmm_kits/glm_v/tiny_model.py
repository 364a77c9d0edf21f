"""A small random model of GLM-4.1V to 4.6V with its real special tokens, chat template conventions and processors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BaseImageProcessor,
    BaseVideoProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lmm_r1.lmm_kits.kit import LmmKit, TinyModelSpec
from lmm_r1.lmm_kits.tiny_model import heads_of, text_settings, train_tokenizer

# In the order of the released ids.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
# Renders as the first release does: nothing behind a turn but the next one, media in place in the user's turns alone, and
# nothing at all of other roles. Later ones write tools' answers, and a thought before each of the model's.
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- macro shown(kind) -%}<|begin_of_{{ kind }}|><|{{ kind }}|><|end_of_{{ kind }}|>{%- endmacro -%}
{%- set openings = {'system': '<|system|>', 'user': '<|user|>', 'assistant': '<|assistant|>'} -%}
{%- for turn in messages if turn.role in openings -%}
{{- openings[turn.role] + '\\n' -}}
{%- if turn.role != 'user' or turn.content is string -%}
{{- turn.content -}}
{%- else -%}
{%- for part in turn.content -%}
{{- part.text if part.type == 'text' else shown(part.type) -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
VISION_LAYERS = 2
IMAGE_SIDE = 112  # Of 8 x 8 position embeddings; 336 pixels and 24 x 24 in the release.
# For both frames of a step: one merged patch is 28 x 28 pixels. The release asks for 16 of them.
IMAGE_PIXELS = {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 1280}
VIDEO_PIXELS = {"shortest_edge": 2 * 56 * 56, "longest_edge": 28 * 28 * 4096}
# The first half of a head's 32 dimensions turns, split over time, height and width in the release's proportions; why the
# base is so small: `qwen_vl.tiny_model`.
ROPE = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}


def write_tiny(
    kit: LmmKit,
    spec: TinyModelSpec,
    corpus: Iterable[str],
    folder: str | Path,
    *,
    image_processor: BaseImageProcessor,
    video_processor: BaseVideoProcessor,
    text_config: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Write a random checkpoint of the kit's classes, its processor and chat template to `folder`, and return its model.

    Args:
        text_config: what the language model's config has beside or instead of the family's.
    """
    tokenizer = train_tokenizer(
        corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(spec.seed)
    model = kit.model_class(_config(kit, spec, tokenizer, text_config or {}))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(END_TOKENS))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor = kit.processor_class(
        image_processor=image_processor,
        tokenizer=tokenizer,
        video_processor=video_processor,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    return model


def _config(
    kit: LmmKit, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase, text_config: Mapping[str, Any]
) -> PretrainedConfig:
    token_ids = {
        f"{kind}{place}_token_id": tokenizer.convert_tokens_to_ids(f"<|{opening}{kind}|>")
        for kind in ("image", "video")
        for place, opening in (("_start", "begin_of_"), ("_end", "end_of_"), ("", ""))
    }
    return kit.config_class(
        text_config={**text_settings(spec, tokenizer), "rope_parameters": dict(ROPE), **text_config},
        vision_config={
            "depth": VISION_LAYERS,
            "hidden_size": spec.hidden_size,
            "num_heads": heads_of(spec),
            "image_size": IMAGE_SIDE,
            # What it hands on, and the width of its layers' MLPs.
            "out_hidden_size": spec.hidden_size,
            # Of the merger.
            "intermediate_size": 2 * spec.hidden_size,
            "initializer_range": spec.hidden_size**-0.5,
        },
        tie_word_embeddings=spec.tie_embeddings,
        **token_ids,
    )
