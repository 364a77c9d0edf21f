"""vLLM's Qwen2.5-VL with the times of video frames, and Qwen3-VL-MoE for both layouts of expert weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.models import qwen3_vl_moe
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen2_vl import Qwen2VLDummyInputsBuilder, Qwen2VLMultiModalDataParser
from vllm.multimodal import MULTIMODAL_REGISTRY

from lmm_r1.lmm_kits.qwen_vl.qwen3 import DOWN, GATE_UP, is_released


class TimedVideoInfo(Qwen2_5_VLProcessingInfo):
    """Takes videos as pairs of frames and metadata, as vLLM's own classes for later models do."""

    def get_data_parser(self) -> Qwen2VLMultiModalDataParser:
        return Qwen2VLMultiModalDataParser(
            self.get_hf_config().vision_config.spatial_merge_size,
            video_needs_metadata=True,
            expected_hidden_size=self._get_expected_hidden_size(),
            allow_missing_mm_embeddings=self.allow_missing_mm_embeddings,
        )


class TimedVideoDummies(Qwen2VLDummyInputsBuilder):
    """The inputs with which vLLM measures its memory."""

    def _get_dummy_videos(self, **size: Any) -> list[tuple[Any, dict[str, object]]]:
        videos = super()._get_dummy_videos(**size)
        return [
            (frames, {"fps": 2.0, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))})
            for frames in videos
        ]


class TimedVideoProcessor(Qwen2_5_VLMultiModalProcessor):
    """Hands frames and metadata to the Hugging Face processor as the two arguments that it has for them."""

    def _preprocess_hf_mm_data(
        self, mm_data: Mapping[str, object], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> tuple[Mapping[str, object], Mapping[str, object]]:
        if "videos" not in mm_data:
            return mm_data, hf_processor_mm_kwargs
        videos = mm_data["videos"]
        assert isinstance(videos, Iterable), "vLLM gives a pair of frames and metadata for each"
        frames, metadata = zip(*videos, strict=True)
        arguments = {"video_metadata": list(metadata), "do_sample_frames": False}
        return {**mm_data, "videos": list(frames), **arguments}, hf_processor_mm_kwargs


@MULTIMODAL_REGISTRY.register_processor(TimedVideoProcessor, info=TimedVideoInfo, dummy_inputs=TimedVideoDummies)
class TimedVideoModel(Qwen2_5_VLForConditionalGeneration):
    """vLLM's model with another preparation of videos."""


class EitherLayoutModel(qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):
    """vLLM's model, which transposes experts' weights before it loads them."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint and return the names of the parameters that it filled."""
        return super().load_weights(released(weights, hidden_size=self.config.text_config.hidden_size))


def released(weights: Iterable[tuple[str, torch.Tensor]], *, hidden_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with those of experts in the released layout."""
    for name, weight in weights:
        if name.endswith((GATE_UP, DOWN)) and not is_released(name, weight.shape, hidden_size=hidden_size):
            weight = weight.transpose(1, 2)
        yield name, weight
