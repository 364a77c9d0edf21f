"""Small checkpoints of architectures without a kit: transformers' own classes, and tokenizers with the real special tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.tiny_models import CORPUS
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedTokenizerBase

from lmm_r1.lmm_kits.discovery import HIDDEN, shrunk
from lmm_r1.lmm_kits.tiny_model import TinyTokens, train_named_tokenizer

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
GRID = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}, **NORMAL}


@dataclass(frozen=True, kw_only=True)
class Kitless:
    """How one architecture writes an image, and what of its default config does not fit a small model."""

    mark: str
    tokens: tuple[str, ...]
    processor: str
    image_processor: str
    settings: Mapping[str, Any]
    ids: Mapping[str, str | tuple[str, ...]]
    """Names in the config of the ids of tokens."""
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the processor."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tokens by names of the tokenizer's attributes."""
    video_processor: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)


GLM = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>")
KITLESS: dict[str, Kitless] = {
    "mistral3": Kitless(
        mark="[IMG]",
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        processor="PixtralProcessor",
        image_processor="PixtralImageProcessor",
        settings={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}, **NORMAL},
        parts={"patch_size": 14, "spatial_merge_size": 2},
        ids={"image_token_index": "[IMG]"},
        vision={"image_size": 112},
    ),
    "lfm2_vl": Kitless(
        mark="<image>",
        tokens=(
            "<image>",
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        ),
        processor="Lfm2VlProcessor",
        image_processor="Lfm2VlImageProcessor",
        settings={
            "tile_size": 64,
            "encoder_patch_size": 16,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "max_num_patches": 64,
            "max_tiles": 4,
            **NORMAL,
        },
        names={"image_token": "<image>"},
        ids={"image_token_id": "<image>"},
        text={
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
            "full_attn_idxs": [2],
            "conv_dim": HIDDEN,
            "block_dim": HIDDEN,
        },
        vision={"num_patches": 16},
    ),
    "paligemma": Kitless(
        mark="<image>",
        tokens=("<image>", "<bos>", *(f"<loc{number:04d}>" for number in range(4))),
        processor="PaliGemmaProcessor",
        image_processor="SiglipImageProcessor",
        settings={"size": {"height": 56, "width": 56}, "image_seq_length": 16, **NORMAL},
        names={"image_token": "<image>"},
        roles={"bos_token": "<bos>"},
        ids={"image_token_index": "<image>"},
        vision={"image_size": 56},
    ),
    "glm_ocr": Kitless(
        mark="<|begin_of_image|><|image|><|end_of_image|>",
        tokens=GLM,
        processor="Glm46VProcessor",
        image_processor="Glm46VImageProcessor",
        video_processor="Glm46VVideoProcessor",
        settings=GRID,
        ids={
            f"{kind}{place}_token_id": f"<|{opening}{kind}|>"
            for kind in ("image", "video")
            for place, opening in (("_start", "begin_of_"), ("_end", "end_of_"), ("", ""))
        },
        text={
            # vLLM takes it for the width of the projector, which is three times the language model's.
            "intermediate_size": 3 * HIDDEN,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
                "partial_rotary_factor": 1.0,
            },
        },
        vision={"out_hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN},
    ),
}


def build_kitless(name: str, folder: Path) -> Path:
    """Write a checkpoint of an architecture's default config made small, with its processor; return the folder."""
    made = KITLESS[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokens = TinyTokens(
        chat_template=TEMPLATE.replace("IMAGE", made.mark),
        special=(*TURNS, *made.tokens),
        names=made.names,
        roles=made.roles,
    )
    tokenizer = train_named_tokenizer(tokens, CORPUS, folder, vocab_size=None)
    config = small_config(name, made, tokenizer)
    torch.manual_seed(0)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor(made, tokenizer).save_pretrained(folder)
    return folder


def processor(made: Kitless, tokenizer: PreTrainedTokenizerBase) -> Any:
    parts: dict[str, Any] = {"image_processor": getattr(transformers, made.image_processor)(**made.settings)}
    if made.video_processor is not None:
        parts["video_processor"] = getattr(transformers, made.video_processor)()
    return getattr(transformers, made.processor)(
        tokenizer=tokenizer, chat_template=tokenizer.chat_template, **parts, **made.parts
    )


def small_config(name: str, made: Kitless, tokenizer: PreTrainedTokenizerBase) -> Any:
    default = CONFIG_MAPPING[name]()
    data = shrunk(default).to_dict()
    ids = {
        key: tokenizer.convert_tokens_to_ids(tokens if isinstance(tokens, str) else list(tokens))
        for key, tokens in made.ids.items()
    }
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    data["text_config"] |= {"vocab_size": len(tokenizer), **ends, **made.text}
    data["vision_config"] |= made.vision
    if "vocab_size" in data:
        data["vocab_size"] = len(tokenizer)
    return type(default).from_dict({**data, **ends, **ids})
