"""A small random model of Idefics 3's architecture with its real special tokens, chat template and processors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lmm_r1.lmm_kits.idefics import AROUND_IMAGE, END_OF_TURN, IMAGE, WHOLE_IMAGE
from lmm_r1.lmm_kits.kit import LmmKit, TinyModelSpec
from lmm_r1.lmm_kits.tiny_model import heads_of, save_model, text_settings, train_tokenizer

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

# The places of tiles that the released tokenizers know.
PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
START, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (UNKNOWN, START, PAD, WHOLE_IMAGE, *PLACES, AROUND_IMAGE, IMAGE, END_OF_TURN)
# Renders as the released checkpoints do: one start token, no space between "User:" and an image, and nothing at all for
# a message that is a string.
CHAT_TEMPLATE = START + """\
{%- for message in messages -%}
{{- message.role | capitalize + ':' -}}
{%- if message.content[0].type != 'image' -%}{{- ' ' -}}{%- endif -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}{%- elif part.type == 'image' -%}{{- '<image>' -}}{%- endif -%}
{%- endfor -%}
{{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
VISION_LAYERS = 2
# 6 x 6 patches a tile, of which each 3 x 3 become one token, and two tiles along the longer side of an image. In the
# releases 27 x 27 patches and 3 x 3, or 32 x 32 and 4 x 4; four tiles.
PATCH_SIZE, TILE, SCALE = 14, 84, 3
LONGEST_SIDE = 2 * TILE
TOKENS_PER_TILE = (TILE // PATCH_SIZE // SCALE) ** 2
SIZES = {"size": {"longest_edge": LONGEST_SIDE}, "max_image_size": {"longest_edge": TILE}}
"""What the image processor is told of them."""


def write_tiny(
    kit: LmmKit,
    spec: TinyModelSpec,
    corpus: Iterable[str],
    folder: str | Path,
    *,
    image_processor: BaseImageProcessor,
    **processors: Any,
) -> None:
    """Write a random checkpoint of the kit's classes, its processor and chat template to `folder`.

    Args:
        processors: what the processor has beside image processor and tokenizer.
    """
    trained = train_tokenizer(
        corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
    )
    # Loaded again, as the image tokens get their names in the tokenizer on loading.
    trained.save_pretrained(folder)
    names = {"image_token": IMAGE, "fake_image_token": AROUND_IMAGE, "global_image_token": WHOLE_IMAGE}
    tokenizer = AutoTokenizer.from_pretrained(
        folder,
        bos_token=START,
        unk_token=UNKNOWN,
        extra_special_tokens={**names, "end_of_utterance_token": END_OF_TURN},
    )
    torch.manual_seed(spec.seed)
    save_model(kit.model_class(_config(kit, spec, tokenizer)), tokenizer, folder)
    processor = kit.processor_class(
        image_processor=image_processor,
        tokenizer=tokenizer,
        image_seq_len=TOKENS_PER_TILE,
        chat_template=CHAT_TEMPLATE,
        **processors,
    )
    processor.save_pretrained(folder)


def _config(kit: LmmKit, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    return kit.config_class(
        text_config={**text_settings(spec, tokenizer), "model_type": "llama"},
        vision_config={
            "hidden_size": spec.hidden_size,
            "intermediate_size": 2 * spec.hidden_size,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": heads_of(spec),
            "image_size": TILE,
            "patch_size": PATCH_SIZE,
            "initializer_range": spec.hidden_size**-0.5,
        },
        scale_factor=SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=spec.hidden_size**-0.5,
        tie_word_embeddings=spec.tie_embeddings,
    )
