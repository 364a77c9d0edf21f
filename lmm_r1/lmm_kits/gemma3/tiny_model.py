"""A small random Gemma 3 with its real special tokens, chat template conventions, image processor and attention layers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GemmaTokenizer,
)

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.tiny_model import HEAD_DIM, heads_of, show_places, text_settings, train_character_bpe

# In the order of the released ids, with the tokens of images at the vocabulary's end.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>")
IMAGE_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
# Runs of line breaks are tokens of their own, so that they never grow together with other text.
LINE_BREAKS = tuple("\n" * count for count in range(1, 9))
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
# Renders as the released checkpoints do: a system turn opens the first user turn, texts lose white space at both ends,
# and images stand in place, without the blank lines that the processor puts around them.
CHAT_TEMPLATE = """\
{%- set opening = '' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content -%}
{%- set opening = (first if first is string else first[0].text) + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for turn in turns -%}
{%- if (turn.role == 'user') == (loop.index0 % 2 == 1) -%}
{{- raise_exception('user and assistant do not alternate') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '\\n' -}}
{%- if loop.first -%}{{- opening -}}{%- endif -%}
{%- if turn.content is string -%}
{{- turn.content | trim -}}
{%- else -%}
{%- for part in turn.content -%}
{%- if part.type == 'image' -%}
{{- '<start_of_image>' -}}
{%- elif part.type == 'text' -%}
{{- part.text | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
ORDINARY_TOKENS = 256
VOCAB_MULTIPLE = 64  # The released vocabulary is padded, too.
VISION_LAYERS = 2
# 8 x 8 patches, of which each 2 x 2 become one token; 64 x 64 and 4 x 4 in the releases.
IMAGE_SIZE, PATCH_SIZE, TOKENS_PER_IMAGE = 112, 14, 16
# Shorter than long prompts, so that it is felt, and longer than an image: vLLM's GPU backends treat images that are
# longer than the window in their own way.
SLIDING_WINDOW = 64


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    tokenizer = _tokenizer(tokenizer_corpus, vocab_size=spec.tokens or ORDINARY_TOKENS)
    torch.manual_seed(spec.seed)
    model = Gemma3ForConditionalGeneration(_config(spec, tokenizer))
    # A fresh projector is zero, and images would change nothing.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=spec.hidden_size**-0.5)
    show_places(model.model.vision_tower.embeddings.position_embedding.weight)
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    _name_as_released(Path(folder) / "model.safetensors")
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(
            size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        image_seq_length=TOKENS_PER_IMAGE,
    )
    processor.save_pretrained(folder)


def _tokenizer(corpus: Iterable[str], *, vocab_size: int) -> GemmaTokenizer:
    """Return a tokenizer of the released class, which names `<eos>` as its end token, as the released ones do."""
    pieces, merges = train_character_bpe(corpus, vocab_size=vocab_size)
    tokens = dict.fromkeys((*SPECIAL_TOKENS, *LINE_BREAKS, *BYTES, *pieces, *IMAGE_TOKENS.values()))
    tokenizer = GemmaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        extra_special_tokens=IMAGE_TOKENS,
        add_bos_token=True,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in LINE_BREAKS])
    return tokenizer


def _name_as_released(file: Path) -> None:
    """Give the vision tower's weights the names of the released checkpoints, which is what vLLM reads.

    Transformers saves a model that it built itself under new names, and one that it loaded under those it found.
    """
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _config(spec: TinyModelSpec, tokenizer: GemmaTokenizer) -> Gemma3Config:
    return Gemma3Config(
        text_config={
            **text_settings(spec, tokenizer),
            "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": SLIDING_WINDOW,
            # The last layer sees everything, and every second one before it; one in six in the releases.
            "layer_types": [
                "full_attention" if layer % 2 else "sliding_attention" for layer in range(spec.layers, 0, -1)
            ],
            "rope_parameters": {
                # The releases' factor is 8 and their base 1,000,000, which leave a head as narrow as this one no rotation
                # by which it could tell the tokens of an image apart.
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        vision_config={
            "hidden_size": spec.hidden_size,
            "intermediate_size": 2 * spec.hidden_size,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": heads_of(spec),
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        initializer_range=spec.hidden_size**-0.5,
        tie_word_embeddings=spec.tie_embeddings,
    )
