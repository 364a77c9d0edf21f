"""What the tiny checkpoints of kits share: sizes, and tokenizers trained offline, with real special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.lmm_kits.kit import TinyModelSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

HEAD_DIM = 32  # vLLM's CPU attention takes no smaller one.
ORDINARY_TOKENS = 384
PLACE_STD = 0.5  # Of a position embedding, beside patches whose features have a standard deviation of about one.

# The pre-tokenizer of GPT-4 and Qwen: contractions, words with one leading space, single digits, punctuation, spaces.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def heads_of(spec: TinyModelSpec) -> int:
    """Return the number of attention heads."""
    return max(2, spec.hidden_size // HEAD_DIM)


def text_settings(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the settings of a small language model, by their names in a config."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "intermediate_size": 4 * spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": heads_of(spec),
        "num_key_value_heads": heads_of(spec) // 2,
        "max_position_embeddings": 32768,
        # The released models' 0.02 suits their width; a narrow model starts learning sooner at 1 / sqrt(width).
        "initializer_range": spec.hidden_size**-0.5,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def show_places(positions: torch.Tensor) -> None:
    """Draw a tower's position embeddings (N, C) anew, as large as what patches show.

    Fresh ones are so small that nothing behind the tower finds out where in an image a token lies; trained ones are not.
    """
    import torch

    torch.nn.init.normal_(positions, std=PLACE_STD)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write the model, whose responses end with the tokenizer's end token."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)


def train_tokenizer(
    corpus: Iterable[str],
    *,
    vocab_size: int | None = None,
    special_tokens: Sequence[str],
    eos_token: str,
    pad_token: str,
    chat_template: str,
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most `vocab_size` ordinary tokens (256 bytes and merges), then the special ones.

    Args:
        vocab_size: None takes so many that tests stay fast.
    """
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
        vocab_size=vocab_size or ORDINARY_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
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
