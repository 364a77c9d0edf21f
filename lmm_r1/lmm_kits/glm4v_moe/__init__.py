"""The kit of GLM-4.5V and GLM-4.6V, mixtures of experts: routers with a bias that is not trained, beside experts for all tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import (
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
)

from lmm_r1.lmm_kits.glm_v import GlmVKit
from lmm_r1.lmm_kits.kit import RouterScores, TinyModelSpec

CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"
# Of the tiny model: two groups of experts, of which a token takes one, as a release could; those so far have one group.
TINY_ROUTING = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}


class Glm4vMoeKit(GlmVKit):
    """A token's experts are those of the highest sigmoid scores with the router's bias added, weighted without it.

    The bias (`e_score_correction_bias`) is a buffer, in fp32 whatever the training's precision: it balanced the experts'
    load in pre-training (https://arxiv.org/abs/2408.15664), and stays as it was released.
    """

    model_type = "glm4v_moe"
    checkpoints = "GLM-4.5V, GLM-4.6V"
    config_class = Glm4vMoeConfig
    model_class = Glm4vMoeForConditionalGeneration
    processor_class = Glm46VProcessor
    engine_class = "LmmR1Glm4vMoeForConditionalGeneration"
    # Norms of queries and keys are neither in transformers' model nor in any release with images.
    engine_text_config = {"use_qk_norm": False}
    zero3_leaf_classes = ("Glm4vMoeVisionEmbeddings", "Glm4vMoeTextMoE")

    def router_scores(self, config: Glm4vMoeConfig) -> RouterScores:
        return "sigmoid"

    def engine_arguments(self, config: Glm4vMoeConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
        """Return vLLM's arguments, and in any case the class of `engine_model`, whose output layer may be tied."""
        arguments = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        return {**arguments, "hf_overrides": {**arguments["hf_overrides"], "architectures": [self.engine_class]}}

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.glm_v.tiny_model import IMAGE_PIXELS, VIDEO_PIXELS, write_tiny
        from lmm_r1.lmm_kits.tiny_model import HEAD_DIM

        model = write_tiny(
            self,
            spec,
            tokenizer_corpus,
            folder,
            image_processor=Glm46VImageProcessor(size=dict(IMAGE_PIXELS)),
            video_processor=Glm46VVideoProcessor(size=dict(VIDEO_PIXELS)),
            text_config={
                **TINY_ROUTING,
                "head_dim": HEAD_DIM,
                # In no layer two sizes are the same, so that a tensor that stands the wrong way round fits nowhere.
                "moe_intermediate_size": 3 * spec.hidden_size // 2,
                "first_k_dense_replace": min(1, spec.layers - 1),
            },
        )
        for name, bias in model.named_buffers():
            if name.endswith(CORRECTION_BIAS):
                # As large as the scores' differences, and no numbers of bf16.
                bias.normal_(std=0.1)
        model.save_pretrained(folder)


KIT = Glm4vMoeKit()
