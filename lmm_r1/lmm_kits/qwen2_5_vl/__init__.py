"""The kit of Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from lmm_r1.lmm_kits.kit import EncodedPrompt, TinyModelSpec
from lmm_r1.lmm_kits.qwen_vl import QwenVlKit

ENGINE_CLASS = "LmmR1Qwen2_5_VLForConditionalGeneration"


class Qwen25VlKit(QwenVlKit):
    """A step of a video counts as long as it lasts in the positions; vLLM learns that by a class of ours."""

    model_type = "qwen2_5_vl"
    checkpoints = "Qwen2.5-VL"
    config_class = Qwen2_5_VLConfig
    model_class = Qwen2_5_VLForConditionalGeneration
    processor_class = Qwen2_5_VLProcessor

    def image_scales(
        self, processor: Qwen2_5_VLProcessor, encoded: EncodedPrompt, *, sizes: Sequence[tuple[int, int]]
    ) -> tuple[tuple[float, float], ...]:
        """Return the stored sizes over those that are shown: coordinates are pixels of the image as the tower sees it."""
        if not sizes:
            return ()
        assert encoded.media is not None, "the prompt has images"
        side, grids = processor.image_processor.patch_size, encoded.media["image_grid_thw"].tolist()
        return tuple(
            (width / (columns * side), height / (rows * side))
            for (width, height), (_, rows, columns) in zip(sizes, grids, strict=True)
        )

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
