"""The kit of GLM-4.1V and of GLM-4.6V-Flash, the dense models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
)

from lmm_r1.lmm_kits.glm_v import GlmVKit
from lmm_r1.lmm_kits.kit import TinyModelSpec


class Glm4vKit(GlmVKit):
    """A language model of two norms around each attention and each MLP."""

    model_type = "glm4v"
    checkpoints = "GLM-4.1V, GLM-4.6V-Flash"
    config_class = Glm4vConfig
    model_class = Glm4vForConditionalGeneration
    processor_class = Glm4vProcessor
    engine_class = "LmmR1Glm4vForConditionalGeneration"
    # In transformers' model always.
    engine_text_config = {"attention_bias": True}
    # It reads the weight of its position embedding without running it, and ZeRO-3 gathers only what is run.
    zero3_leaf_classes = ("Glm4vVisionEmbeddings",)

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.glm_v.tiny_model import IMAGE_PIXELS, VIDEO_PIXELS, write_tiny

        write_tiny(
            self,
            spec,
            tokenizer_corpus,
            folder,
            image_processor=Glm4vImageProcessor(size=dict(IMAGE_PIXELS)),
            video_processor=Glm4vVideoProcessor(size=dict(VIDEO_PIXELS)),
        )


KIT = Glm4vKit()
