"""A small random LLaVA-OneVision with its real special tokens, chat template and processors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerBase,
)

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.tiny_model import heads_of, save_model, text_settings, train_tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
# Renders as the released checkpoints do: a space behind the role but where a turn is to be generated, images before the
# words of a message, each text on a line of its own, and nothing between two turns.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + ' ' -}}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}{{- '<image>' -}}{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'video') -%}{{- '<video>' -}}{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}{{- '\\n' + part['text'] -}}{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
VISION_LAYERS = 2
# 4 x 4 patches a crop, and up to 4 x 4 crops, of which more than nine are scaled down; 27 x 27 and 6 x 6 in the releases.
CROP, PATCH_SIZE, CROPS = 56, 14, 4
GRIDS = [[rows * CROP, columns * CROP] for rows in range(1, CROPS + 1) for columns in range(1, CROPS + 1)]


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    tokenizer = train_tokenizer(
        tokenizer_corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(spec.seed)
    save_model(LlavaOnevisionForConditionalGeneration(_config(spec, tokenizer)), tokenizer, folder)
    _name_as_released(Path(folder) / "model.safetensors")
    size = {"height": CROP, "width": CROP}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size, image_grid_pinpoints=GRIDS, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        num_image_tokens=(CROP // PATCH_SIZE) ** 2,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)


def _name_as_released(file: Path) -> None:
    """Give the vision tower's weights the names of the released checkpoints, which is what vLLM reads.

    Transformers saves a model that it built itself under new names, and one that it loaded under those it found.
    """
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _config(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionConfig:
    image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    return LlavaOnevisionConfig(
        text_config={
            **text_settings(spec, tokenizer),
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": spec.hidden_size,
            "intermediate_size": 2 * spec.hidden_size,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": heads_of(spec),
            "image_size": CROP,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
            "initializer_range": spec.hidden_size**-0.5,
        },
        image_grid_pinpoints=GRIDS,
        image_token_index=image,
        video_token_index=video,
        initializer_range=spec.hidden_size**-0.5,
        tie_word_embeddings=spec.tie_embeddings,
    )
