"""The kit of SmolVLM2; the first SmolVLM has the `model_type` of Idefics 3."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import (
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from lmm_r1.lmm_kits.idefics import IdeficsKit
from lmm_r1.lmm_kits.kit import TinyModelSpec


class SmolVlmKit(IdeficsKit):
    """Text and images. Videos are left out: transformers' processor gives their frames the name of the images' tiles."""

    model_type = "smolvlm"
    checkpoints = "SmolVLM2"
    config_class = SmolVLMConfig
    model_class = SmolVLMForConditionalGeneration
    processor_class = SmolVLMProcessor
    engine_architecture = "LmmR1SmolVLMForConditionalGeneration"

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.idefics.tiny_model import SIZES, write_tiny

        write_tiny(
            self,
            spec,
            tokenizer_corpus,
            folder,
            image_processor=SmolVLMImageProcessor(**SIZES),
            video_processor=SmolVLMVideoProcessor(**SIZES),
        )


KIT = SmolVlmKit()
