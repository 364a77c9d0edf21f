"""A small byte-level BPE tokenizer, trained offline, with the special tokens and conventions of a real one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The pre-tokenizer of GPT-4 and Qwen: contractions, words with one leading space, single digits, punctuation, spaces.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    corpus: Iterable[str],
    *,
    vocab_size: int,
    special_tokens: Sequence[str],
    eos_token: str,
    pad_token: str,
    chat_template: str,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most `vocab_size` ordinary tokens (256 bytes and merges), then the special ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        pad_token=pad_token,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def train_character_bpe(corpus: Iterable[str], *, vocab_size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the pieces and the merges of a BPE over characters, in which "▁" stands for a space.

    As SentencePiece trains them: no piece spans two words, digits stay single, and lines are kept apart.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"),
            pre_tokenizers.Split("▁", behavior="merged_with_next"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    printable = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=["▁", *printable], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    vocab = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocab, key=vocab.__getitem__), [(left, right) for left, right in merges]
