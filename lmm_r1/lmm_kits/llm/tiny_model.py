"""A small random language model: the Qwen2 architecture with ChatML."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.tiny_tokenizer import train_tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif -%}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}"
)
ORDINARY_TOKENS = 384
HEAD_DIM = 32  # vLLM's CPU attention takes no smaller one.


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its tokenizer and chat template to `folder`."""
    tokenizer = train_tokenizer(
        tokenizer_corpus,
        vocab_size=ORDINARY_TOKENS,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    heads = max(2, spec.hidden_size // HEAD_DIM)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=4 * spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=32768,
        initializer_range=spec.hidden_size**-0.5,  # 0.02 suits wide models
        tie_word_embeddings=spec.tie_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(spec.seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
