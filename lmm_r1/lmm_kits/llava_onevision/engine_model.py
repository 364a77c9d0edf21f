"""vLLM's LLaVA-OneVision, which also takes weights under the names that transformers 5 has for the vision tower."""

from __future__ import annotations

from vllm.model_executor.models import llava_onevision
from vllm.multimodal import MULTIMODAL_REGISTRY

from lmm_r1.lmm_kits.engine_names import NEW_TOWER_NAMES


@MULTIMODAL_REGISTRY.register_processor(
    llava_onevision.LlavaOnevisionMultiModalProcessor,
    info=llava_onevision.LlavaOnevisionProcessingInfo,
    dummy_inputs=llava_onevision.LlavaOnevisionDummyInputsBuilder,
)
class LlavaOnevisionEngineModel(llava_onevision.LlavaOnevisionForConditionalGeneration):
    """vLLM's model as it is, with names of either layout."""

    hf_to_vllm_mapper = llava_onevision.LlavaOnevisionForConditionalGeneration.hf_to_vllm_mapper | NEW_TOWER_NAMES
