"""The kit of Idefics 3, which the first SmolVLM is, too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
)

from lmm_r1.lmm_kits.idefics import IdeficsKit
from lmm_r1.lmm_kits.kit import TinyModelSpec


class Idefics3Kit(IdeficsKit):
    """Text and images."""

    model_type = "idefics3"
    checkpoints = "SmolVLM, Idefics3-8B"
    config_class = Idefics3Config
    model_class = Idefics3ForConditionalGeneration
    processor_class = Idefics3Processor
    engine_architecture = "LmmR1Idefics3ForConditionalGeneration"

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.idefics.tiny_model import SIZES, write_tiny

        write_tiny(self, spec, tokenizer_corpus, folder, image_processor=Idefics3ImageProcessor(**SIZES))


KIT = Idefics3Kit()
