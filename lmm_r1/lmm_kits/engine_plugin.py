"""Registers our classes with vLLM, which calls `register` in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations

from lmm_r1 import cpu
from lmm_r1.lmm_kits.registry import given_kits

ENGINE_CLASSES: dict[str, str] = {
    "AriaForConditionalGeneration": "lmm_r1.lmm_kits.aria.engine_model:AriaForConditionalGeneration",
    "LmmR1Gemma3ForConditionalGeneration": "lmm_r1.lmm_kits.gemma3.engine_model:Gemma3ForConditionalGeneration",
    "LmmR1Gemma4ForConditionalGeneration": "lmm_r1.lmm_kits.gemma4.engine_model:Gemma4EngineModel",
    "LmmR1Glm4vForConditionalGeneration": "lmm_r1.lmm_kits.glm_v.engine_model:SeveralVideosModel",
    "LmmR1Glm4vMoeForConditionalGeneration": "lmm_r1.lmm_kits.glm_v.engine_model:TiedMixtureModel",
    "LmmR1Idefics3ForConditionalGeneration": "lmm_r1.lmm_kits.idefics.engine_model:Idefics3EngineModel",
    "LmmR1InternVLForConditionalGeneration": "lmm_r1.lmm_kits.internvl.engine_model:MarkedModel",
    "LmmR1Qwen2_5_VLForConditionalGeneration": "lmm_r1.lmm_kits.qwen_vl.engine_model:TimedVideoModel",
    "LmmR1SmolVLMForConditionalGeneration": "lmm_r1.lmm_kits.idefics.engine_model:SmolVLMEngineModel",
    "Phi4MultimodalForCausalLM": "lmm_r1.lmm_kits.phi4_multimodal.engine_model:Phi4MultimodalEngineModel",
    "Phi3VForCausalLM": "lmm_r1.lmm_kits.phi3_v.engine_model:Phi3VForCausalLM",
    "Qwen3_5ForConditionalGeneration": "lmm_r1.lmm_kits.qwen_vl.engine_model:DenseModel",
    "Qwen3_5MoeForConditionalGeneration": "lmm_r1.lmm_kits.qwen_vl.engine_model:MixtureModel",
}
"""Architecture in a checkpoint's `config.json` or a kit's `hf_overrides` -> "module:class" of the model that vLLM runs."""
CONFIGURED_LIKE: dict[str, str] = {"LmmR1Gemma4ForConditionalGeneration": "Gemma4ForConditionalGeneration"}
"""Architecture of ours -> the one of vLLM's whose settings it needs, such as an attention backend."""


def register() -> None:
    """Register the classes with vLLM and transformers; may be called again."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    cpu.prepare_engine()
    from lmm_r1.lmm_kits.phi3_v import register_auto_classes

    register_auto_classes()
    # A user's file registers what it needs when it is imported.
    list(given_kits())
    for architecture, place in ENGINE_CLASSES.items():
        ModelRegistry.register_model(architecture, place)
    for architecture, known in CONFIGURED_LIKE.items():
        MODELS_CONFIG_MAP[architecture] = MODELS_CONFIG_MAP[known]
