"""A small random Phi-3.5-vision with its real special tokens, chat template conventions and image processor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.phi3_v.configuration import Phi3VConfig
from lmm_r1.lmm_kits.phi3_v.image_processing import Phi3VImageProcessor
from lmm_r1.lmm_kits.phi3_v.modeling import Phi3VForCausalLM
from lmm_r1.lmm_kits.phi3_v.processing import Phi3VProcessor
from lmm_r1.lmm_kits.tiny_tokenizer import train_tokenizer

SPECIAL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<|endoftext|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|user|>",
    "<|image|>",
)
# Renders as the released checkpoint's does: every role alike, nothing before the first turn, text alone as content.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'assistant' -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
ORDINARY_TOKENS = 384
HEAD_DIM = 32  # vLLM's CPU attention takes no smaller one.
# As deep as the release's tower, since the name of the one layer that is never trained counts them; narrow instead, and
# with patches so large that a crop of 336 pixels has 6 x 6 of them, which become 3 x 3 tokens.
CLIP_WIDTH = 32
PATCH_SIZE = 56
CROP_TOKENS = 9


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    tokenizer = train_tokenizer(
        tokenizer_corpus,
        vocab_size=ORDINARY_TOKENS,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    config = _config(spec, {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}, len(tokenizer))
    torch.manual_seed(spec.seed)
    model = Phi3VForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    image_processor = Phi3VImageProcessor(num_img_tokens=CROP_TOKENS)
    Phi3VProcessor(image_processor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)


def _config(spec: TinyModelSpec, ids: dict[str, int], vocab_size: int) -> Phi3VConfig:
    heads = max(2, spec.hidden_size // HEAD_DIM)
    return Phi3VConfig(
        vocab_size=vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=4 * spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=32768,
        original_max_position_embeddings=32768,
        # The released model's 0.02 suits its width; a narrow model starts learning sooner at 1 / sqrt(width).
        initializer_range=spec.hidden_size**-0.5,
        tie_word_embeddings=spec.tie_embeddings,
        bos_token_id=ids["<s>"],
        eos_token_id=ids["<|end|>"],
        pad_token_id=ids["<|endoftext|>"],
        image_token_id=ids["<|image|>"],
        img_processor={
            "image_dim_out": CLIP_WIDTH,
            "num_img_tokens": CROP_TOKENS,
            "clip_overrides": {
                "hidden_size": CLIP_WIDTH,
                "intermediate_size": CLIP_WIDTH,
                "num_attention_heads": CLIP_WIDTH // HEAD_DIM,
                "patch_size": PATCH_SIZE,
                "initializer_range": CLIP_WIDTH**-0.5,
            },
        },
    )
