"""Linear layers in 4 bits under adapters: NF4 with double quantization, as QLoRA has them (https://arxiv.org/abs/2305.14314).

Layers are quantized after a checkpoint was loaded as always, each of them on the process's own device, where it stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from transformers import PreTrainedModel

# Numbers that have a scale in common, and scales that have one in turn.
BLOCK, SCALES = 64, 256
_STATE = ".quant_state.bitsandbytes__nf4"  # ends the name of what a state dict has beside a weight in 4 bits


class FrozenLinear4bit(Linear4bit):
    """A linear layer that is not trained, its weight in 4 bits; it loads from its state dict as other layers do."""

    weight: Params4bit

    @classmethod
    def of(cls, layer: torch.nn.Linear, *, device: torch.device) -> FrozenLinear4bit:
        """Return a layer in the place of `layer`, which computes in the precision of that one's weight."""
        weight = layer.weight.data
        with torch.device("meta"):
            made = cls(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=weight.dtype,
                compress_statistics=True,
                quant_type="nf4",
            )
        # On CPUs with instructions for bf16 an evaluation would turn the weight around, and compute in bf16.
        made.support_avx512bf16_for_cpu = False
        made.weight = packed(weight, device=device)
        made.quant_state = made.weight.quant_state
        made.weight.module = made
        made.bias = layer.bias
        return made.requires_grad_(False)

    def dequantized(self) -> torch.Tensor:
        """Return the weight (N, M) that the layer computes with, in the precision that it was quantized from."""
        return dequantize_4bit(self.weight.data, self.weight.quant_state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        place = f"{prefix}weight."
        stored = {
            name.removeprefix(place): state_dict.pop(name) for name in list(state_dict) if name.startswith(place)
        }
        if stored:
            self.quant_state = self.weight.quant_state = QuantState.from_dict(stored, device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def packed(weight: torch.Tensor, *, device: torch.device) -> Params4bit:
    """Return a weight in 4 bits; the whole one is on the device no longer than that takes."""
    made = Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4")
    return made.to(device)


def quantize_layers(model: PreTrainedModel, names: Iterable[str], *, device: torch.device) -> None:
    """Put layers in 4 bits in the place of a model's linear layers of these names."""
    for name in names:
        model.set_submodule(name, FrozenLinear4bit.of(model.get_submodule(name), device=device))
    # Where peft looks for what it is to adapt.
    model.is_loaded_in_4bit = True


def quantized_layers(model: torch.nn.Module) -> dict[str, FrozenLinear4bit]:
    """Return the layers in 4 bits by their names; empty for a model without any."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear4bit)}


def plain_weight(layer: torch.nn.Module) -> torch.Tensor:
    """Return a linear layer's weight (N, M), dequantized where it is in 4 bits."""
    if isinstance(layer, FrozenLinear4bit):
        return layer.dequantized()
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight


def rounded(weight: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return what is left of a weight that a run in `dtype` has in 4 bits, in the weight's own precision."""
    made = packed(weight.to(dtype), device=weight.device)
    return dequantize_4bit(made.data, made.quant_state).to(weight.dtype)


def dequantized_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict with whole weights in the place of those in 4 bits and of what stands beside them."""
    names = [name.removesuffix(_STATE) for name in tensors if name.endswith(_STATE)]
    beside = tuple(f"{name}." for name in names)
    plain = {name: tensor for name, tensor in tensors.items() if not (beside and name.startswith(beside))}
    for name in names:
        stored = {key.removeprefix(f"{name}."): tensors[key] for key in tensors if key.startswith(f"{name}.")}
        plain[name] = dequantize_4bit(tensors[name], QuantState.from_dict(stored, device=tensors[name].device))
    return plain


def packed_bytes(numbers: int) -> int:
    """Return what a weight of so many numbers takes in 4 bits, the scales of its blocks included."""
    blocks = -(-numbers // BLOCK)
    return -(-numbers // 2) + blocks + 4 * -(-blocks // SCALES)
