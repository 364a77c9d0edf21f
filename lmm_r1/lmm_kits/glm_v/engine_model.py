"""vLLM's models of GLM-4.1V to 4.6V for prompts with several videos, of which vLLM 0.29 allows one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models import glm4_1v
from vllm.multimodal import MULTIMODAL_REGISTRY


class SeveralVideosInfo(glm4_1v.Glm4vProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, "video": None}

    def _get_video_second_idx_glm46v(self, metadata: Mapping[str, Any], total_frames: int) -> list[float]:
        """Return when each step begins: GLM-4.6V's processor writes tenths of seconds, which vLLM cuts off."""
        return [index / metadata["fps"] for index in metadata["frames_indices"][::2]]


_registered = MULTIMODAL_REGISTRY.register_processor(
    glm4_1v.Glm4vMultiModalProcessor, info=SeveralVideosInfo, dummy_inputs=glm4_1v.Glm4vDummyInputsBuilder
)


@_registered
class SeveralVideosModel(glm4_1v.Glm4vForConditionalGeneration):
    """vLLM's model, with several videos per prompt and more exact times."""


@_registered
class TiedMixtureModel(glm4_1v.Glm4vMoeForConditionalGeneration):
    """The same for the mixtures of experts, whose output layer has no weights in vLLM if it is tied."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        language_model = self.language_model
        if self.config.tie_word_embeddings and isinstance(language_model.lm_head, ParallelLMHead):
            language_model.lm_head = language_model.lm_head.tie_weights(language_model.model.embed_tokens)
