"""vLLM's Qwen2.5-VL with the times of video frames, and its Qwen3.5 on CPUs in every precision.

vLLM's own kernel for Qwen3.5's linear attention on CPUs takes bfloat16 and heads of 64 or 128 dimensions only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import conv1d, silu, softplus
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen2_vl import Qwen2VLDummyInputsBuilder, Qwen2VLMultiModalDataParser
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.delta_rule import SegmentTree, gated_delta_rule, one_token_each


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
        return [
            (frames, {"fps": 2.0, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))})
            for frames in super()._get_dummy_videos(**size)
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


KERNEL_WIDTHS = (64, 128)


class DenseModel(Qwen3_5ForConditionalGeneration):
    """vLLM's dense model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        use_torch(self, vllm_config)


class MixtureModel(Qwen3_5MoeForConditionalGeneration):
    """vLLM's mixture of experts."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        use_torch(self, vllm_config)


def use_torch(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Let linear layers that vLLM's kernel for CPUs does not take run in PyTorch; raises UserError if tokens are guessed."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if not isinstance(layer, QwenGatedDeltaNetAttention):
            continue
        one_width = layer.head_k_dim == layer.head_v_dim and layer.head_k_dim in KERNEL_WIDTHS
        if not (one_width and layer.conv1d.weight.dtype == torch.bfloat16):
            if vllm_config.speculative_config is not None:
                raise UserError(
                    "--vllm.speculative_tokens: on CPUs, linear attention layers take guessed tokens in bfloat16 alone, with "
                    f"heads of {' or '.join(map(str, KERNEL_WIDTHS))} dimensions; leave it out"
                )
            layer._forward_method = partial(_forward, layer)
            layer.conv1d.quant_method = _UnpackedWeights()


class _UnpackedWeights(UnquantizedLinearMethod):
    """Leaves the convolution's weight as it is; packed, only the kernel could read it."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return None


def _forward(layer: QwenGatedDeltaNetAttention, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the outputs (N, H) of a step's N tokens, and update the states of their sequences."""
    projected, _ = layer.in_proj_qkvz(hidden_states)
    scalars, _ = layer.in_proj_ba(hidden_states)
    mixed, gate = projected.split([2 * layer.key_dim + layer.value_dim, layer.value_dim], dim=-1)
    gate = gate.unflatten(-1, (-1, layer.head_v_dim))
    contexts = get_forward_context().attn_metadata
    if contexts is None:
        # vLLM measures its memory.
        return layer._output_projection(torch.zeros_like(gate), gate)
    return layer._output_projection(_outputs(layer, contexts[layer.prefix], mixed, scalars, gate), gate)


def _outputs(
    layer: QwenGatedDeltaNetAttention,
    step: GDNAttentionMetadata,
    mixed: torch.Tensor,
    scalars: torch.Tensor,
    gate: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs (N, heads, V), zeros for tokens that only fill a step up."""
    assert step.spec_sequence_masks is None, "tokens are not guessed"
    count = step.num_decodes + step.num_prefills
    slots = step.non_spec_state_indices_tensor[:count].long()
    lengths = step.non_spec_query_start_loc[: count + 1].diff().tolist()
    known = torch.ones(count, dtype=torch.bool)
    if step.num_prefills:
        known[step.num_decodes :] = step.has_initial_state[step.num_decodes : count]
    tokens = sum(lengths)
    inputs = _convolved(layer, mixed[:tokens], slots, known, lengths)
    query, key, value = (
        part.unflatten(-1, (-1, width))
        for part, width in zip(
            inputs.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1),
            (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim),
            strict=True,
        )
    )
    repeats = value.shape[1] // key.shape[1]
    query, key = (tensor.repeat_interleave(repeats, dim=1) for tensor in (query, key))
    beta, speed = scalars[:tokens].float().chunk(2, dim=-1)
    decay = -layer.A_log.float().exp() * softplus(speed + layer.dt_bias.float())
    cached = layer.kv_cache[1]
    # vLLM names value and key dimensions the other way round.
    states = cached.view(*cached.shape[:2], layer.head_k_dim, layer.head_v_dim)
    before = torch.where(known[:, None, None, None], states[slots], 0.0).float()
    rule = (query, key, value, decay, beta.sigmoid())
    if max(lengths) == 1:
        outputs, after = one_token_each(*rule, before)
    else:
        tree = SegmentTree(lengths=tuple(lengths), prefixes=(None,) * count, device=inputs.device)
        outputs, after = gated_delta_rule(*rule, tree, initial=before)
    states[slots] = after.to(states.dtype)
    whole = torch.zeros_like(gate)
    whole[:tokens] = outputs.to(whole.dtype)
    return whole


def _convolved(
    layer: QwenGatedDeltaNetAttention,
    mixed: torch.Tensor,
    slots: torch.Tensor,
    known: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """Return the convolved inputs (N, D) of sequences, and keep their last inputs."""
    cached = layer.kv_cache[0]
    last = cached.transpose(1, 2) if is_conv_state_dim_first() else cached  # (slots, W - 1, D)
    weight = layer.conv1d.weight  # (D, 1, W)
    before = torch.where(known[:, None, None], last[slots], 0.0).to(mixed.dtype)
    if max(lengths) == 1:
        inputs = torch.cat([before, mixed[:, None]], dim=1)  # (N, W, D)
        last[slots] = inputs[:, 1:].to(last.dtype)
        return silu((inputs * weight.squeeze(1).t()).sum(1))
    outputs = []
    for slot, history, part in zip(slots, before, mixed.split(list(lengths)), strict=True):
        inputs = torch.cat([history, part])
        last[slot] = inputs[len(inputs) - len(history) :].to(last.dtype)
        outputs.append(silu(conv1d(inputs.t()[None], weight, groups=len(weight))[0].t()))
    return torch.cat(outputs)
