"""The kits of Qwen3-VL and Qwen3.5, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import (
    PreTrainedModel,
    Qwen2VLImageProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from lmm_r1.data.images import Video
from lmm_r1.data.messages import VideoPart
from lmm_r1.lmm_kits.encoding import bounded_steps
from lmm_r1.lmm_kits.features import GridPoint, Parts
from lmm_r1.lmm_kits.qwen_vl import MARKS, ROPE, SPECIAL_TOKENS, QwenVlKit
from lmm_r1.lmm_kits.tiny_model import HEAD_DIM, TinyModelSpec, TinyTokens, chatml, heads_of

# Of the tiny model. The features of the tower's first two layers are added after the first two layers of the language
# model, but not after its last one, where they would affect no response.
VISION_LAYERS = 3
POSITIONS = 16 * 16
HALF = [0.5, 0.5, 0.5]
# One merged patch of 32 x 32 pixels is enough; the released checkpoint needs at least 64 of them per image.
IMAGE_PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 1280}
VIDEO_PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 4096}


class DeepstackPoint(GridPoint):
    """The tower with its projector, whose output has features of inner layers, too."""

    def take(self, output: BaseModelOutputWithDeepstackFeatures) -> Parts:
        return (output.pooler_output, *output.deepstack_features)

    def give(self, parts: Parts) -> BaseModelOutputWithDeepstackFeatures:
        return BaseModelOutputWithDeepstackFeatures(pooler_output=parts[0], deepstack_features=list(parts[1:]))


class TimedStepsKit(QwenVlKit):
    """The processor writes the time of each step of a video as text before the step's placeholders."""

    processor_class = Qwen3VLProcessor
    writes_thousandths = True
    vision_prefixes = (*QwenVlKit.vision_prefixes, "model.visual.pos_embed.")
    # vLLM's class of the language model; vLLM 0.29's CPU platform needs its name (platforms/cpu.py asks for `use_mla`).
    engine_text_config: ClassVar[Mapping[str, Any]]
    # No default system turn, unlike in earlier releases.
    tiny_tokens = TinyTokens(special=SPECIAL_TOKENS, chat_template=chatml(MARKS))

    def bounded_video(self, processor: Qwen3VLProcessor, video: Video, part: VideoPart) -> Video:
        return bounded_steps(processor, video, part)

    def tiny_vision(self, spec: TinyModelSpec) -> dict[str, object]:
        return {
            "depth": VISION_LAYERS,
            "intermediate_size": 2 * spec.hidden_size,
            "out_hidden_size": spec.hidden_size,
            "num_position_embeddings": POSITIONS,
        }

    def tiny_parts(self) -> dict[str, object]:
        return {
            "image_processor": Qwen2VLImageProcessor(
                patch_size=16, size=dict(IMAGE_PIXELS), image_mean=HALF, image_std=HALF
            ),
            "video_processor": Qwen3VLVideoProcessor(size=dict(VIDEO_PIXELS)),
        }


def tiny_mixture(spec: TinyModelSpec) -> dict[str, object]:
    """Return a tiny model's experts; all sizes of a layer differ, so that a transposed tensor fits nowhere."""
    return {"moe_intermediate_size": 3 * spec.hidden_size // 2, "num_experts": 4, "num_experts_per_tok": 2}


class DeepstackKit(TimedStepsKit):
    """Features of the tower's inner layers are added after the language model's first layers."""

    projector_prefixes = (*QwenVlKit.projector_prefixes, "model.visual.deepstack_merger_list.")
    feature_points = (DeepstackPoint(owner="model.visual", projects=True),)

    def cut_inputs(
        self, language_model: torch.nn.Module, inputs: Mapping[str, Any], tokens: slice
    ) -> dict[str, object]:
        """Return the inputs for some tokens, with what the first layers add to embeddings of images (V, H)."""
        cut = super().cut_inputs(language_model, inputs, tokens)
        visual = inputs["visual_pos_masks"]  # (1, T)
        if visual is None:
            return cut
        before, inside = int(visual[:, : tokens.start].sum()), int(visual[:, tokens].sum())
        added = [embeds[before : before + inside] for embeds in inputs["deepstack_visual_embeds"]]
        return {**cut, "visual_pos_masks": visual[:, tokens], "deepstack_visual_embeds": added}

    def tiny_vision(self, spec: TinyModelSpec) -> dict[str, object]:
        added = list(range(min(VISION_LAYERS - 1, spec.layers - 1)))
        return {**super().tiny_vision(spec), "deepstack_visual_indexes": added}

    def tiny_text(self, spec: TinyModelSpec) -> dict[str, object]:
        # Time, height and width alternate along the rotations instead of having a section each.
        rope = {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        return {"head_dim": HEAD_DIM, "rope_parameters": rope}


class Qwen3VlKit(DeepstackKit):
    """The dense models."""

    model_type = "qwen3_vl"
    checkpoints = "Qwen3-VL"
    config_class = Qwen3VLConfig
    model_class = Qwen3VLForConditionalGeneration
    engine_text_config = {"architectures": ["Qwen3ForCausalLM"]}


class Qwen3VlMoeKit(DeepstackKit):
    """The mixtures of experts, whose weights are two tensors per layer."""

    model_type = "qwen3_vl_moe"
    checkpoints = "Qwen3-VL-MoE (30B-A3B, 235B-A22B)"
    config_class = Qwen3VLMoeConfig
    model_class = Qwen3VLMoeForConditionalGeneration
    # In transformers the weights of a token's experts always sum to 1; vLLM reads this from the config.
    engine_text_config = {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    zero3_leaf_classes = ("Qwen3VLMoeTextSparseMoeBlock",)
    takes_4bit = False

    def tiny_text(self, spec: TinyModelSpec) -> dict[str, object]:
        return {**super().tiny_text(spec), **tiny_mixture(spec), "norm_topk_prob": True}


# Files have experts as the releases do, (E, in, out), and the model (E, out, in). Transformers 5.15 itself writes the model's
# layout, which vLLM 0.29 and transformers 4 cannot read.
register_checkpoint_conversion_mapping(
    Qwen3VlMoeKit.model_type,
    [
        WeightConverter(source_patterns=name, target_patterns=name, operations=[Transpose(1, 2)])
        for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ],
    overwrite=True,
)


# Of the tiny model: by how much its slowest and its fastest head forget at each token, before the gate.
DECAYS = (0.005, 0.1)
# A quarter of a head's dimensions is rotated in the release, and the widths of time, height and width are 11, 11 and 10.
ROTATED, SECTIONS = 0.5, [3, 3, 2]


# As the releases from 3.6 on with `preserve_thinking`: the prompt opens a thought, and every answer has one, empty or not.
_THINKING = """\
{%- for turn in messages -%}{%- set text -%}{%- if turn.content is string -%}{{- turn.content -}}{%- else -%}
{%- for part in turn.content -%}{{- part.text if part.type == 'text' else MARKS[part.type] -}}{%- endfor -%}
{%- endif -%}{%- endset -%}
{%- if turn.role == 'tool' -%}{%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + text | trim + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif turn.role == 'assistant' -%}{%- set pieces = ('</think>' + text | trim).split('</think>') -%}
{{- '<|im_start|>assistant\\n<think>\\n' + pieces[-2].split('<think>')[-1] | trim -}}
{{- '\\n</think>\\n\\n' + pieces[-1].lstrip('\\n') + '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + turn.role + '\\n' + text | trim + '<|im_end|>\\n' -}}
{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
""".replace("MARKS", repr(MARKS))


class DeltaNetKit(TimedStepsKit):
    """Linear layers keep a state of fixed size: a matrix per head, and the last inputs of a short convolution."""

    tiny_tokens = TinyTokens(special=SPECIAL_TOKENS, chat_template=_THINKING)

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
