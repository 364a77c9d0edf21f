"""The kits of Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)

from lmm_r1.lmm_kits.kit import EncodedPrompt
from lmm_r1.lmm_kits.qwen_vl import QwenVlKit
from lmm_r1.lmm_kits.tiny_model import VISION_LAYERS, TinyModelSpec


class Qwen2VlKit(QwenVlKit):
    """A step of a video always counts 1 in the positions, because its processor does not return how long a step lasts."""

    model_type = "qwen2_vl"
    checkpoints = "Qwen2-VL"
    config_class = Qwen2VLConfig
    model_class = Qwen2VLForConditionalGeneration
    processor_class = Qwen2VLProcessor
    writes_thousandths = True

    def tiny_vision(self, spec: TinyModelSpec) -> dict[str, object]:
        # The tower's own width is `embed_dim`; `hidden_size` is the language model's.
        return {"embed_dim": spec.hidden_size, "mlp_ratio": 2}


class Qwen25VlKit(QwenVlKit):
    """A step of a video counts as long as it lasts in the positions; in vLLM a class of ours does so (`engine_model`)."""

    model_type = "qwen2_5_vl"
    checkpoints = "Qwen2.5-VL"
    config_class = Qwen2_5_VLConfig
    model_class = Qwen2_5_VLForConditionalGeneration
    processor_class = Qwen2_5_VLProcessor
    video_engine_architecture = "LmmR1Qwen2_5_VLForConditionalGeneration"

    def image_scales(
        self, processor: Qwen2_5_VLProcessor, encoded: EncodedPrompt, *, sizes: Sequence[tuple[int, int]]
    ) -> tuple[tuple[float, float], ...]:
        """Return the stored sizes divided by the resized ones: coordinates are pixels of the image that the tower gets."""
        if not sizes:
            return ()
        assert encoded.media is not None, "the prompt has images"
        side, grids = processor.image_processor.patch_size, encoded.media["image_grid_thw"].tolist()
        return tuple(
            (width / (columns * side), height / (rows * side))
            for (width, height), (_, rows, columns) in zip(sizes, grids, strict=True)
        )

    def tiny_vision(self, spec: TinyModelSpec) -> dict[str, object]:
        return {
            "intermediate_size": 2 * spec.hidden_size,
            "out_hidden_size": spec.hidden_size,
            "fullatt_block_indexes": [VISION_LAYERS - 1],
            "tokens_per_second": 2,
        }
