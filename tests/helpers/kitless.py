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
    video_settings: Mapping[str, Any] = field(default_factory=dict)
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
    "cohere2_vision": Kitless(
        mark="<|IMG_PATCH|>",
        tokens=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>"),
        processor="Cohere2VisionProcessor",
        image_processor="Cohere2VisionImageProcessor",
        settings={"size": {"height": 64, "width": 64}, "patch_size": 4, "max_patches": 4, **NORMAL},
        names={
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
            "image_token": "<|IMG_PATCH|>",
        },
        ids={"image_token_id": "<|IMG_PATCH|>"},
        vision={"image_size": 64, "patch_size": 8},
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
    "llama4": Kitless(
        mark="<|image|>",
        tokens=(
            "<|image_start|>",
            "<|image_end|>",
            "<|image|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        processor="Llama4Processor",
        image_processor="Llama4ImageProcessor",
        settings={"size": {"height": 56, "width": 56}, "max_patches": 4, **NORMAL},
        parts={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        ids={
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
            "image_token_index": "<|patch|>",
        },
        text={"attention_chunk_size": 8192},
        vision={
            "image_size": 56,
            "intermediate_size": 4 * HIDDEN,
            "vision_output_dim": HIDDEN,
            "projector_input_dim": HIDDEN,
            "projector_output_dim": HIDDEN,
        },
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
    "ernie4_5_vl_moe": Kitless(
        mark="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        tokens=(
            "<|IMAGE_PLACEHOLDER|>",
            "<|IMAGE_START|>",
            "<|IMAGE_END|>",
            "<|VIDEO_PLACEHOLDER|>",
            "<|VIDEO_START|>",
            "<|VIDEO_END|>",
        ),
        processor="Ernie4_5_VLMoeProcessor",
        image_processor="Ernie4_5_VLMoeImageProcessor",
        video_processor="Ernie4_5_VLMoeVideoProcessor",
        video_settings={"draw_on_frames": False},
        settings=GRID,
        names={
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        ids={
            f"{kind}{place}_token_id": f"<|{kind.upper()}{written}|>"
            for kind in ("image", "video")
            for place, written in (("_start", "_START"), ("_end", "_END"), ("", "_PLACEHOLDER"))
        },
        text={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [5, 5, 6]}},
    ),
    "ovis2": Kitless(
        mark="<image>",
        tokens=("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        processor="Ovis2Processor",
        image_processor="Ovis2ImageProcessor",
        settings={"size": {"height": 56, "width": 56}, "max_patches": 4, **NORMAL},
        parts={"image_seq_length": 16},
        ids={
            "image_token_id": "<IMG_ATOM>",
            "visual_indicator_token_ids": ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        },
        vision={"image_size": 56},
    ),
    "kimi_k25": Kitless(
        mark="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        tokens=(
            "<|media_begin|>",
            "<|media_content|>",
            "<|media_end|>",
            "<|media_pad|>",
            "<|kimi_k25_video_placeholder|>",
        ),
        processor="Kimi_K25Processor",
        image_processor="Kimi_K25ImageProcessor",
        video_processor="Kimi_K25VideoProcessor",
        settings=NORMAL,
        ids={
            "image_token_id": "<|media_pad|>",
            "video_token_id": "<|kimi_k25_video_placeholder|>",
            "vision_start_token_id": "<|media_begin|>",
            "vision_end_token_id": "<|media_end|>",
        },
        vision={"pos_emb_height": 8, "pos_emb_width": 8},
    ),
    "minimax_m3_vl": Kitless(
        mark="]<]image[>[",
        tokens=("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
        processor="MiniMaxM3VLProcessor",
        image_processor="MiniMaxM3VLImageProcessor",
        video_processor="MiniMaxM3VLVideoProcessor",
        settings=GRID,
        ids={"image_token_index": "]<]image[>[", "video_token_index": "]<]video[>["},
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
        parts["video_processor"] = getattr(transformers, made.video_processor)(**made.video_settings)
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


def main() -> None:
    """Print the verdicts of architectures as YAML, for tests/data/tables/contracts/test_derived_kits.yaml."""
    import sys
    import tempfile

    import yaml

    from lmm_r1 import cpu

    cpu.prepare_process()
    from lmm_r1.cli.derive import derive

    for model in sys.argv[1:] or KITLESS:
        with tempfile.TemporaryDirectory() as folder:
            derived = derive(str(build_kitless(model, Path(folder) / "model")), Path(folder) / "kit.json")
            verdicts = {name: "yes" if found.confirmed else found.reason for name, found in derived.items()}
        yaml.safe_dump({model: verdicts}, sys.stdout, sort_keys=False, width=1000)


if __name__ == "__main__":
    main()
