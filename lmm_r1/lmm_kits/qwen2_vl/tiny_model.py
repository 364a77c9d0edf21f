"""A small random Qwen2-VL with its real special tokens, chat template conventions and processors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from lmm_r1.lmm_kits.base import TinyModelSpec
from lmm_r1.lmm_kits.qwen2_5_vl.tiny_model import (
    DEFAULT_SYSTEM,
    TURNS,
    VIDEO_PIXELS,
    VISION_LAYERS,
    heads,
    media_token_ids,
    text_config,
    tiny_tokenizer,
    write_checkpoint,
)


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    tokenizer = tiny_tokenizer(tokenizer_corpus, chat_template=DEFAULT_SYSTEM + TURNS)
    config = Qwen2VLConfig(
        text_config=text_config(spec, tokenizer),
        # The tower's own width is `embed_dim`; `hidden_size` is the language model's.
        vision_config={
            "depth": VISION_LAYERS,
            "embed_dim": spec.hidden_size,
            "hidden_size": spec.hidden_size,
            "mlp_ratio": 2,
            "num_heads": heads(spec),
            "initializer_range": spec.hidden_size**-0.5,
        },
        tie_word_embeddings=spec.tie_embeddings,
        **media_token_ids(tokenizer),
    )
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=dict(VIDEO_PIXELS)),
        chat_template=tokenizer.chat_template,
    )
    write_checkpoint(
        folder, model_class=Qwen2VLForConditionalGeneration, config=config, processor=processor, seed=spec.seed
    )
