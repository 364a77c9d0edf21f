"""vLLM's LLaVA-OneVision, which also takes weights under the names that transformers 5 has for the vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.models import llava_onevision
from vllm.multimodal import MULTIMODAL_REGISTRY

from lmm_r1.lmm_kits.engine_plugin import new_tower_names


class WholeVideosInfo(llava_onevision.LlavaOnevisionProcessingInfo):
    """Keeps all frames of videos."""

    def get_hf_processor(self, **kwargs: object) -> Any:
        processor = super().get_hf_processor(**kwargs)
        processor.video_processor.do_sample_frames = False
        return processor

    def get_num_frames_with_most_features(self, seq_len: int, mm_counts: Mapping[str, int]) -> int:
        """Return how many fit into a prompt; vLLM expects at most 16 and refuses longer videos later."""
        return max(self._get_max_video_frames(seq_len) // max(mm_counts.get("video", 0), 1), 1)


class SmallFrames(llava_onevision.LlavaOnevisionDummyInputsBuilder):
    """The inputs with which vLLM measures its memory: frames of their one size, not of the largest image's."""

    def _get_dummy_videos(self, *, width: int, height: int, **others: Any) -> list[Any]:
        side = self.info.get_hf_config().vision_config.image_size
        return super()._get_dummy_videos(width=side, height=side, **others)


@MULTIMODAL_REGISTRY.register_processor(
    llava_onevision.LlavaOnevisionMultiModalProcessor, info=WholeVideosInfo, dummy_inputs=SmallFrames
)
class LlavaOnevisionEngineModel(llava_onevision.LlavaOnevisionForConditionalGeneration):
    """vLLM's model with names of either layout, and with videos of different lengths in one batch."""

    hf_to_vllm_mapper = llava_onevision.LlavaOnevisionForConditionalGeneration.hf_to_vllm_mapper | new_tower_names()

    def _process_video_pixels(
        self, inputs: llava_onevision.LlavaOnevisionVideoPixelInputs
    ) -> list[torch.Tensor] | torch.Tensor:
        """Return features (tokens, H) for each video: vLLM 0.29 makes (1, tokens, H) if lengths differ, and then refuses it."""
        features = super()._process_video_pixels(inputs)
        return features if isinstance(features, torch.Tensor) else [one.squeeze(0) for one in features]
