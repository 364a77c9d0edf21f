"""The two layouts of experts in files: the released one, (E, in, out), and that of the model in transformers, (E, out, in).

Transformers 5.15 reads both, and writes its own, which vLLM 0.29 and transformers 4 cannot read. Here files are written
in the released one, whichever was read.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def register_released_layout(model_type: str) -> None:
    """Let transformers in this process read either layout, and write the released one; may be called again."""
    converters = [
        WeightConverter(source_patterns=name, target_patterns=name, operations=[FromFile()])
        for name in (GATE_UP, DOWN)
    ]
    register_checkpoint_conversion_mapping(model_type, converters, overwrite=True)


def is_released(name: str, shape: torch.Size, *, hidden_size: int) -> bool:
    """Say whether a tensor of a file has the released layout: (E, H, 2 I) to the experts and (E, I, H) back.

    Where H is 2 I or I, both layouts have one shape, and the file is taken for a released one.
    """
    return shape[1 if name.endswith(GATE_UP) else 2] == hidden_size


class FromFile(ConversionOps):
    """Turns what a file holds to (E, out, in).

    Unlike transformers' own, it asks the config for the sizes and not the weights, of which ZeRO-3 leaves none here.
    """

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        tensor, (name,) = _only(input_dict), target_patterns
        released = is_released(name, tensor.shape, hidden_size=kwargs["config"].get_text_config().hidden_size)
        return {name: tensor.transpose(1, 2).contiguous() if released else tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        return ToFile()


class ToFile(ConversionOps):
    """Turns the model's (E, out, in) to the released layout."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        (name,) = target_patterns
        return {name: _only(input_dict).transpose(1, 2).contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        return FromFile()


def _only(tensors: dict[str, Any]) -> torch.Tensor:
    (value,) = tensors.values()
    return value[0] if isinstance(value, list) else value
