"""A small random Qwen3-VL with its real special tokens, chat template conventions and processors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from lmm_r1.lmm_kits.base import TinyModelSpec
from lmm_r1.lmm_kits.qwen2_5_vl.tiny_model import (
    HEAD_DIM,
    TURNS,
    heads,
    media_token_ids,
    text_config,
    tiny_tokenizer,
    write_checkpoint,
)

# The features of the first two layers go behind the first two layers of the language model, but for its last one:
# behind that they would reach no response.
VISION_LAYERS = 3
POSITIONS = 16 * 16
HALF = [0.5, 0.5, 0.5]
# One merged patch of 32 x 32 pixels is enough; the released checkpoint asks for 64 of them in an image.
IMAGE_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 1280}
VIDEO_PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 4096}


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    # No default system turn, unlike in the releases before.
    tokenizer = tiny_tokenizer(tokenizer_corpus, chat_template=TURNS)
    text = text_config(spec, tokenizer)
    # Time, height and width take turns along the rotations instead of having a section each.
    rope = {**text["rope_parameters"], "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={**text, "head_dim": HEAD_DIM, "rope_parameters": rope},
        vision_config={
            "depth": VISION_LAYERS,
            "hidden_size": spec.hidden_size,
            "intermediate_size": 2 * spec.hidden_size,
            "num_heads": heads(spec),
            "out_hidden_size": spec.hidden_size,
            "num_position_embeddings": POSITIONS,
            "deepstack_visual_indexes": list(range(min(VISION_LAYERS - 1, spec.layers - 1))),
            "initializer_range": spec.hidden_size**-0.5,
        },
        tie_word_embeddings=spec.tie_embeddings,
        **media_token_ids(tokenizer),
    )
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, size=dict(IMAGE_PIXELS), image_mean=HALF, image_std=HALF),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=dict(VIDEO_PIXELS)),
        chat_template=tokenizer.chat_template,
    )
    write_checkpoint(
        folder, model_class=Qwen3VLForConditionalGeneration, config=config, processor=processor, seed=spec.seed
    )
