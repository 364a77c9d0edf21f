"""The kit of Qwen3-VL's mixtures of experts: the dense kit's tower and prompts; experts in the released layout on disk."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.qwen3_vl_moe.expert_layout import register_released_layout
from lmm_r1.lmm_kits.qwen_vl.deepstack import DeepstackKit

ENGINE_CLASS = "LmmR1Qwen3VLMoeForConditionalGeneration"
# Of the tiny model.
EXPERTS, EXPERTS_PER_TOKEN = 4, 2


class Qwen3VlMoeKit(DeepstackKit):
    """A router sends each token of a layer to a few experts, whose weights are two tensors a layer."""

    model_type = "qwen3_vl_moe"
    checkpoints = "Qwen3-VL-MoE (30B-A3B, 235B-A22B)"
    config_class = Qwen3VLMoeConfig
    model_class = Qwen3VLMoeForConditionalGeneration
    engine_language_model = "Qwen3MoeForCausalLM"
    zero3_leaf_classes = ("Qwen3VLMoeTextSparseMoeBlock",)

    def engine_arguments(self, config: Qwen3VLMoeConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
        """Return vLLM's limits, the class of `engine_model`, and how a token's experts are weighted.

        Transformers lets the weights of a token's experts sum to 1, whatever `norm_topk_prob` is; vLLM asks the config.
        """
        arguments = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        overrides = arguments["hf_overrides"]
        text = {**overrides["text_config"], "norm_topk_prob": True}
        return {**arguments, "hf_overrides": {**overrides, "text_config": text, "architectures": [ENGINE_CLASS]}}

    def tiny_layers(self, spec: TinyModelSpec) -> dict[str, Any]:
        return {
            # In no layer two sizes are the same, so that a tensor that stands the wrong way round fits nowhere.
            "moe_intermediate_size": 3 * spec.hidden_size // 2,
            "num_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "norm_topk_prob": True,
        }


register_released_layout(Qwen3VlMoeKit.model_type)
KIT = Qwen3VlMoeKit()
