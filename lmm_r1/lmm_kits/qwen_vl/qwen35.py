"""The kits of Qwen3.5, dense and with experts: three of four layers are Gated DeltaNets (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from lmm_r1.lmm_kits.qwen_vl import ROPE
from lmm_r1.lmm_kits.qwen_vl.qwen3 import TimedStepsKit, tiny_mixture
from lmm_r1.lmm_kits.tiny_model import HEAD_DIM, TinyModelSpec, heads_of

# Of the tiny model: by how much its slowest and its fastest head forget at each token, before the gate.
DECAYS = (0.005, 0.1)
# A quarter of a head's dimensions is rotated in the release, and the widths of time, height and width are 11, 11 and 10.
ROTATED, SECTIONS = 0.5, [3, 3, 2]


class DeltaNetKit(TimedStepsKit):
    """Linear layers keep a state of fixed size: a matrix per head, and the last inputs of a short convolution."""

    def tiny_text(self, spec: TinyModelSpec) -> dict[str, object]:
        """Return both kinds of layers in turn, the last one with full attention, and more heads of values than of keys."""
        rope = {**ROPE, "partial_rotary_factor": ROTATED, "mrope_section": SECTIONS, "mrope_interleaved": True}
        kinds = ("full_attention", "linear_attention")
        return {
            "head_dim": HEAD_DIM,
            "rope_parameters": rope,
            # vLLM prefers this one.
            "partial_rotary_factor": ROTATED,
            "layer_types": [kinds[(spec.layers - 1 - layer) % 2] for layer in range(spec.layers)],
            "linear_num_key_heads": heads_of(spec),
            "linear_num_value_heads": 2 * heads_of(spec),
            "linear_key_head_dim": HEAD_DIM,
            "linear_value_head_dim": HEAD_DIM,
        }

    def tune_tiny(self, model: PreTrainedModel, spec: TinyModelSpec) -> None:
        """Let the heads remember: with fresh weights, most of them forget everything at each token."""
        for name, weight in model.named_parameters():
            if name.endswith("linear_attn.A_log"):
                with torch.no_grad():
                    weight.copy_(torch.linspace(*DECAYS, len(weight)).log())


class Qwen35Kit(DeltaNetKit):
    """The dense models. The weights for speculative decoding (`mtp`) are not loaded, and so not saved."""

    model_type = "qwen3_5"
    checkpoints = "Qwen3.5"
    config_class = Qwen3_5Config
    model_class = Qwen3_5ForConditionalGeneration
    engine_text_config = {"architectures": ["Qwen3_5ForCausalLM"]}


class Qwen35MoeKit(DeltaNetKit):
    """The mixtures of experts, with one expert in each layer for all tokens."""

    model_type = "qwen3_5_moe"
    checkpoints = "Qwen3.5-MoE"
    config_class = Qwen3_5MoeConfig
    model_class = Qwen3_5MoeForConditionalGeneration
    engine_text_config = {"architectures": ["Qwen3_5MoeForCausalLM"]}
    zero3_leaf_classes = ("Qwen3_5MoeSparseMoeBlock",)
    takes_4bit = False

    def tiny_text(self, spec: TinyModelSpec) -> dict[str, object]:
        return {
            **super().tiny_text(spec),
            **tiny_mixture(spec),
            "shared_expert_intermediate_size": 2 * spec.hidden_size,
        }
