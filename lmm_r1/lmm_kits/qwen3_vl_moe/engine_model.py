"""vLLM's Qwen3-VL with experts, which takes their weights in the layout of transformers 5 as well as in the released one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from vllm.model_executor.models import qwen3_vl_moe

from lmm_r1.lmm_kits.qwen3_vl_moe.expert_layout import DOWN, GATE_UP, is_released


class EitherLayoutModel(qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):
    """vLLM's model as it is; only what it loads is turned first."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint and return the names of the parameters that it filled."""
        return super().load_weights(released(weights, hidden_size=self.config.text_config.hidden_size))


def released(weights: Iterable[tuple[str, torch.Tensor]], *, hidden_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with those of experts in the released layout."""
    for name, weight in weights:
        if name.endswith((GATE_UP, DOWN)) and not is_released(name, weight.shape, hidden_size=hidden_size):
            weight = weight.transpose(1, 2)
        yield name, weight
