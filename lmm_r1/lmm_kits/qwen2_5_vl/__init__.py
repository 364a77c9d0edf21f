"""The kit of Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.qwen_vl import QwenVlKit

ENGINE_CLASS = "LmmR1Qwen2_5_VLForConditionalGeneration"


class Qwen25VlKit(QwenVlKit):
    """A step of a video counts as long as it lasts in the positions; vLLM learns that by a class of ours."""

    model_type = "qwen2_5_vl"
    checkpoints = "Qwen2.5-VL"
    config_class = Qwen2_5_VLConfig
    model_class = Qwen2_5_VLForConditionalGeneration
    processor_class = Qwen2_5_VLProcessor

    def engine_arguments(self, config: Qwen2_5_VLConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
        """Return vLLM's limits, and for rows with videos the class of `engine_model`, which knows how long they last."""
        limits = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        return {**limits, "hf_overrides": {"architectures": [ENGINE_CLASS]}} if max_videos else limits

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.qwen_vl.tiny_model import VISION_LAYERS, write_tiny

        vision = {
            "intermediate_size": 2 * spec.hidden_size,
            "out_hidden_size": spec.hidden_size,
            "fullatt_block_indexes": [VISION_LAYERS - 1],
            "tokens_per_second": 2,
        }
        write_tiny(self, spec, tokenizer_corpus, folder, vision_config=vision)


KIT = Qwen25VlKit()
