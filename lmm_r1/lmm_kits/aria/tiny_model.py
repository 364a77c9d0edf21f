"""A small random Aria with its real special tokens, chat template conventions and image processor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import (
    AriaConfig,
    AriaForConditionalGeneration,
    AriaImageProcessor,
    AriaProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.tiny_model import heads_of, save_model, text_settings, train_tokenizer

SPECIAL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<|img|>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<|im_start|>",
    "<|im_end|>",
)
# Renders as the released checkpoint does: no default system turn, images in place between the markers of infilling.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<fim_prefix><|img|><fim_suffix>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
VISION_LAYERS = 2
# The processor knows two sizes of an image. The released model cuts them into 35 x 35 and 70 x 70 patches and hands
# 128 and 256 tokens on; larger patches and a sixteenth of the tokens keep the tiny one fast.
PATCH_SIZE = 49
IMAGE_TOKENS = {490: 8, 980: 16}


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    tokenizer = train_tokenizer(
        tokenizer_corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        # The released tokenizer spells <|im_end|> in several tokens, and its users stop at the text. Here it is one
        # token and the end token, as training and sampling need it.
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )
    # Loaded again, as the image token gets its name in the tokenizer on loading.
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, unk_token="<unk>", extra_special_tokens={"image_token": "<|img|>"}
    )
    torch.manual_seed(spec.seed)
    model = AriaForConditionalGeneration(_config(spec, tokenizer))
    save_model(model, tokenizer, folder)
    processor = AriaProcessor(
        image_processor=AriaImageProcessor(),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        size_conversion=IMAGE_TOKENS,
    )
    processor.save_pretrained(folder)


def _config(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> AriaConfig:
    return AriaConfig(
        text_config={
            **text_settings(spec, tokenizer),
            "model_type": "aria_text",
            # Of one expert.
            "intermediate_size": spec.hidden_size,
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 2,
        },
        vision_config={
            "hidden_size": spec.hidden_size,
            "intermediate_size": 2 * spec.hidden_size,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": heads_of(spec),
            "image_size": max(IMAGE_TOKENS),
            "patch_size": PATCH_SIZE,
            "initializer_range": spec.hidden_size**-0.5,
        },
        projector_patch_to_query_dict={(size // PATCH_SIZE) ** 2: tokens for size, tokens in IMAGE_TOKENS.items()},
        image_token_index=tokenizer.image_token_id,
        initializer_range=spec.hidden_size**-0.5,
        tie_word_embeddings=spec.tie_embeddings,
    )
