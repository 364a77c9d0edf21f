"""Builds the tiny random checkpoints of kits: sizes, and tokenizers that are trained offline with real special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

HEAD_DIM = 32  # vLLM's CPU attention takes no smaller one.
ORDINARY_TOKENS = 384
VISION_LAYERS = 2
PLACE_STD = 0.5  # Of a position embedding; features of patches have a standard deviation of about one.

# The pre-tokenizer of GPT-4 and Qwen: contractions, words with one leading space, single digits, punctuation, spaces.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class TinyModelSpec:
    """The size of a randomly initialised checkpoint."""

    hidden_size: int
    layers: int
    seed: int
    tie_embeddings: bool
    tokens: int | None = None
    """The most ordinary tokens of its tokenizer; None is the kit's own number."""


@dataclass(frozen=True, kw_only=True)
class TinyTokens:
    """The special tokens of a tiny model's tokenizer and its chat template, which renders as the released one does."""

    chat_template: str
    special: tuple[str, ...] = ()
    """In the order of the released ids, after the ordinary tokens."""
    end: str = "<|im_end|>"
    padding: str = "<|endoftext|>"
    names: Mapping[str, str] = field(default_factory=dict)
    """Media tokens by the names of the tokenizer's attributes, such as `image_token`."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Further tokens by the tokenizer's own names, such as `bos_token`."""
    first: str | None = None
    """A token that the tokenizer puts before every text."""
    generation_ends: tuple[str, ...] = ()
    """Tokens at which the generation config ends responses; by default the end token."""


# A turn of ChatML with text and media in place.
_CHATML = """\
{%- for turn in messages -%}
{{- '<|im_start|>' + turn.role + '\\n' -}}
{%- if turn.content is string -%}
{{- turn.content -}}
{%- else -%}
{%- for part in turn.content -%}
{{- part.text if part.type == 'text' else MARKS[part.type] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
"""


def chatml(marks: Mapping[str, str], *, default_system: bool = False) -> str:
    """Return the chat template of many releases.

    Args:
        marks: what it writes for an image or a video, by the type of the part.
        default_system: whether a conversation without a system turn gets one.
    """
    return (_DEFAULT_SYSTEM if default_system else "") + _CHATML.replace("MARKS", repr(dict(marks)))


def heads_of(spec: TinyModelSpec) -> int:
    """Return the number of attention heads."""
    return max(2, spec.hidden_size // HEAD_DIM)


def text_settings(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return the settings of a small language model, by their names in a config."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "intermediate_size": 4 * spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": heads_of(spec),
        "num_key_value_heads": heads_of(spec) // 2,
        "max_position_embeddings": 32768,
        # The released models' 0.02 suits their width; a narrow model learns sooner with 1 / sqrt(width).
        "initializer_range": spec.hidden_size**-0.5,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def tower_settings(spec: TinyModelSpec, *, image_size: int, patch_size: int) -> dict[str, object]:
    """Return the settings of a small vision tower, by their names in a config of SigLIP or CLIP."""
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": 2 * spec.hidden_size,
        "num_hidden_layers": VISION_LAYERS,
        "num_attention_heads": heads_of(spec),
        "image_size": image_size,
        "patch_size": patch_size,
        "initializer_range": spec.hidden_size**-0.5,
    }


def show_places(positions: torch.Tensor) -> None:
    """Initialise a tower's position embeddings (N, C) again, with values as large as the features of patches.

    Fresh embeddings are so small that later layers cannot tell where in an image a token is; trained ones are larger.
    """
    import torch

    torch.nn.init.normal_(positions, std=PLACE_STD)


def name_tower_as_released(folder: str | Path) -> None:
    """Rename the saved vision tower's weights as in released checkpoints, which is what vLLM reads.

    Transformers saves a model that it built itself with new names, and a loaded model with the names that it found.
    """
    from safetensors.torch import load_file, save_file

    file = Path(folder) / "model.safetensors"
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def train_fallback_tokenizer(
    tokenizer_class: type[PreTrainedTokenizerBase],
    named: TinyTokens,
    corpus: Iterable[str],
    *,
    vocab_size: int,
    more: Sequence[str] = (),
) -> PreTrainedTokenizerBase:
    """Return a trained tokenizer that falls back to bytes, has runs of line breaks as tokens, and adds a start token.

    Args:
        vocab_size: of ordinary tokens.
        more: media tokens without a name, after all others.
    """
    from tokenizers import AddedToken

    breaks = tuple("\n" * count for count in range(1, 9))
    in_bytes = tuple(f"<0x{value:02X}>" for value in range(256))
    pieces, merges = train_character_bpe(corpus, vocab_size=vocab_size)
    tokens = dict.fromkeys((*named.special, *breaks, *in_bytes, *pieces, *named.names.values(), *more))
    tokenizer = tokenizer_class(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        extra_special_tokens=dict(named.names),
        add_bos_token=True,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
        chat_template=named.chat_template,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in named.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in breaks])
    return tokenizer


def train_named_tokenizer(
    tokens: TinyTokens, corpus: Iterable[str], folder: str | Path, *, vocab_size: int | None
) -> PreTrainedTokenizerBase:
    """Return a trained tokenizer that knows its media tokens by name.

    A tokenizer gets such names only on loading, so it is saved to `folder` and loaded again if it has any.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(tokens, corpus, vocab_size=vocab_size)
    if tokens.first is not None:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens.first} $A", special_tokens=[(tokens.first, tokenizer.convert_tokens_to_ids(tokens.first))]
        )
    if not tokens.names:
        return tokenizer
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, extra_special_tokens=dict(tokens.names), **tokens.roles)


def train_tokenizer(
    tokens: TinyTokens, corpus: Iterable[str], *, vocab_size: int | None = None
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: 256 bytes and merges, then the special tokens.

    Args:
        vocab_size: the most ordinary tokens; None takes few enough for fast tests.
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
    tokenizer.add_special_tokens(list(tokens.special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=tokens.end,
        pad_token=tokens.padding,
        chat_template=tokens.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def train_character_bpe(corpus: Iterable[str], *, vocab_size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the pieces and the merges of a BPE over characters, in which "▁" represents a space.

    It follows SentencePiece: no piece spans two words or two lines, and digits stay single.
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
