"""A small random Janus with its real special tokens, chat template conventions and image processor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.tiny_model import heads_of, save_model, text_settings, train_tokenizer

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, IMAGE_START, IMAGE_END = "<image_placeholder>", "<begin_of_image>", "<end_of_image>"
SPECIAL_TOKENS = (BOS, EOS, PAD, IMAGE, IMAGE_START, IMAGE_END, "<|User|>", "<|Assistant|>")
# Renders as the released checkpoints do: the role and a colon before each message, two newlines behind a user's and
# the end token behind any other, but nothing behind the last one; an image on a line of its own; texts stripped.
CHAT_TEMPLATE = (
    """\
{%- macro write(message) -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '' if loop.first else '\\n' -}}<image_placeholder>{{- '' if loop.last else '\\n' -}}
{%- elif part.type == 'text' -%}
{%- set text = part.text.lstrip() if loop.first else part.text -%}
{%- set text = text.rstrip() if loop.last else text -%}
{{- ' ' if not loop.first and loop.previtem.type == 'text' -}}{{- text -}}
{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- set role = message.role|lower -%}
{{- {'user': '<|User|>', 'assistant': '<|Assistant|>'}.get(role, message.role|capitalize) + ': ' -}}
{{- write(message) -}}
{%- if add_generation_prompt or not loop.last -%}
{{- '\\n\\n' if role == 'user' else '"""
    + EOS
    + """' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>:' -}}{%- endif -%}
"""
)
VISION_LAYERS = 2
# The released models cut 384 x 384 pixels into 24 x 24 patches of 16: 576 placeholders. Here there are 6 x 6.
IMAGE_SIZE = 96
PATCH_SIZE = 16
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    trained = train_tokenizer(
        tokenizer_corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
    )
    # Loaded again, as the image tokens get their names in the tokenizer on loading.
    _begin_with(trained, BOS)
    trained.save_pretrained(folder)
    names = {"image_token": IMAGE, "boi_token": IMAGE_START, "eoi_token": IMAGE_END}
    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token=BOS, extra_special_tokens=names)
    torch.manual_seed(spec.seed)
    model = JanusForConditionalGeneration(_config(spec, tokenizer))
    save_model(model, tokenizer, folder)
    processor = JanusProcessor(
        image_processor=JanusImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        use_default_system_prompt=True,
        num_image_tokens=IMAGE_TOKENS,
    )
    processor.save_pretrained(folder)


def _begin_with(tokenizer: PreTrainedTokenizerFast, token: str) -> None:
    """Make the tokenizer put `token` before every text, as the released one does."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.convert_tokens_to_ids(token))]
    )


def _config(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> JanusConfig:
    return JanusConfig(
        text_config={**text_settings(spec, tokenizer), "model_type": "llama"},
        vision_config={
            "hidden_size": spec.hidden_size,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": heads_of(spec),
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "projection_dim": spec.hidden_size,
            "num_image_tokens": IMAGE_TOKENS,
            "initializer_range": spec.hidden_size**-0.5,
        },
        # The side that draws images, which is never run here: as small as its group norms of 32 groups allow.
        vq_config={
            "num_embeddings": 64,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "projection_dim": spec.hidden_size,
            "image_token_embed_dim": spec.hidden_size,
        },
        image_token_id=tokenizer.image_token_id,
        initializer_range=spec.hidden_size**-0.5,
        tie_word_embeddings=spec.tie_embeddings,
    )
