"""A small random language model: the Qwen2 architecture with ChatML."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.tiny_model import text_settings, train_tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif -%}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}"
)


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its tokenizer and chat template to `folder`."""
    tokenizer = train_tokenizer(
        tokenizer_corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    config = Qwen2Config(**text_settings(spec, tokenizer))
    torch.manual_seed(spec.seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
