"""vLLM's GLM-4.1V for prompts with several videos: vLLM 0.29 allows one."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.model_executor.models import glm4_1v
from vllm.multimodal import MULTIMODAL_REGISTRY


class SeveralVideosInfo(glm4_1v.Glm4vProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, "video": None}


@MULTIMODAL_REGISTRY.register_processor(
    glm4_1v.Glm4vMultiModalProcessor, info=SeveralVideosInfo, dummy_inputs=glm4_1v.Glm4vDummyInputsBuilder
)
class SeveralVideosModel(glm4_1v.Glm4vForConditionalGeneration):
    """vLLM's model as it is; only how many videos a prompt may have differs."""
