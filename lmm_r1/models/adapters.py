"""LoRA adapters and quantized base weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig as PeftConfig
from peft import TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import gather_params_ctx
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lmm_r1.config.shared import LoraConfig
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit

# Numbers that have a scale in common, and scales that have one in turn.
BLOCK, SCALES = 64, 256
_STATE = ".quant_state.bitsandbytes__nf4"  # ends the name of what a state dict has beside a weight in 4 bits


class FrozenLinear4bit(Linear4bit):
    """A linear layer that is not trained, its weight in 4 bits; it loads from its state dict as other layers do."""

    weight: Params4bit

    @classmethod
    def of(cls, layer: torch.nn.Linear, *, device: torch.device) -> FrozenLinear4bit:
        """Return a 4-bit layer that replaces `layer` and computes in the precision of its weight."""
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

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        place = f"{prefix}weight."
        stored = {
            name.removeprefix(place): state_dict.pop(name) for name in list(state_dict) if name.startswith(place)
        }
        if stored:
            self.quant_state = self.weight.quant_state = QuantState.from_dict(stored, device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def packed(weight: torch.Tensor, *, device: torch.device) -> Params4bit:
    """Return a weight in 4 bits; the full one is on the device only meanwhile."""
    made = Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4")
    return made.to(device)


def quantize_layers(model: PreTrainedModel, names: Iterable[str], *, device: torch.device) -> None:
    """Replace a model's linear layers of these names by 4-bit ones."""
    for name in names:
        model.set_submodule(name, FrozenLinear4bit.of(model.get_submodule(name), device=device))
    # peft reads it to choose its layer classes.
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
    """Return a weight as a run in `dtype` computes with its 4-bit form, in the weight's own precision."""
    made = packed(weight.to(dtype), device=weight.device)
    return dequantize_4bit(made.data, made.quant_state).to(weight.dtype)


def dequantized_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict with full-precision weights instead of 4-bit ones and their quantization state."""
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


EVERY_LAYER = "all-linear"
ADAPTER_FOLDER = "adapter"
_ADAPTER = "default"  # peft's name of a model's only adapter
_SAVED_PREFIX = "base_model.model."  # in front of every name in peft's files
# In the metadata of an adapter's file, with the precision that the base was quantized from: its base was in 4 bits.
BASE_IN_4BIT = "base_in_4bit"


def add_adapters(
    model: PreTrainedModel, kit: LmmKit, settings: LoraConfig, *, freeze_prefix: tuple[str, ...] = ()
) -> None:
    """Give the language model's linear layers adapters and freeze everything else; raises UserError for bad settings.

    Args:
        freeze_prefix: layers under these names get none.
    """
    names = chosen_layers(model, kit, settings.target_modules)
    names = [name for name in names if not f"{name}.weight".startswith(freeze_prefix)]
    if not names:
        raise UserError(
            f"--actor.freeze_prefix {' '.join(freeze_prefix)} (in SFT --model.freeze_prefix): leaves no layer that "
            f"--ds.lora.target_modules {' '.join(settings.target_modules)} adapts; leave one out"
        )
    config = PeftConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=settings.used_alpha,
        lora_dropout=settings.dropout,
        target_modules=names,
        bias="none",
        use_rslora=settings.use_rslora,
    )
    inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    for layer in adapted_layers(model).values():
        base = layer.get_base_layer()
        if isinstance(base, FrozenLinear4bit):
            # peft leaves adapters of such a weight in fp32.
            layer.to(base.compute_dtype)
        compute_merged(layer)
    # peft matches suffixes of names, and shortens a long list to suffixes.
    assert list(adapted_layers(model)) == names, "peft adapted other layers than those asked for"


def chosen_layers(model: PreTrainedModel, kit: LmmKit, target_modules: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that get an adapter; raises UserError for a target that is none of them."""
    layers = language_layers(model, kit)
    if tuple(target_modules) == (EVERY_LAYER,):
        if not layers:
            raise UserError(f"--ds.lora.rank: {type(model).__name__} has no linear layer to adapt; leave it out")
        return layers
    for target in target_modules:
        if not any(_ends_with(name, target) for name in layers):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UserError(
                f"--ds.lora.target_modules {target}: the language model has no linear layer of this name; "
                f"it has {known}, and {EVERY_LAYER} alone takes them all"
            )
    return [name for name in layers if any(_ends_with(name, target) for target in target_modules)]


def language_layers(model: PreTrainedModel, kit: LmmKit) -> list[str]:
    """Return the names of the language model's linear layers, without the output layer.

    Where transformers 5 made one tensor of a layer's experts, no layer of another MLP is among them: peft takes its name for
    one that experts had in transformers 4, and would adapt the tensors of experts in its place.
    """
    output_layer = model.get_output_embeddings()
    of_experts = tuple(_MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type), ()))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not output_layer
        and name.rpartition(".")[2] not in of_experts
        and f"{name}.weight".startswith(kit.language_prefixes)
        and not f"{name}.weight".startswith(kit.untrained_prefixes)
    ]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def stored_names(model: PreTrainedModel) -> Callable[[str], str]:
    """Return a function from a weight's name in files, also of older versions of transformers, to its name in the model."""
    state, transforms = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    return lambda stored: rename_source_key(stored, renamings, converters, model.base_model_prefix, state)[0]


def adapted_layers(model: torch.nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with an adapter by their name in the bare model; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def layer_weights(layer: LoraLayer) -> tuple[torch.nn.Parameter, torch.nn.Parameter, torch.nn.Parameter]:
    """Return a layer's own weight (N, M), or that in 4 bits, and its adapter's two factors, A (R, M) and B (N, R)."""
    return layer.get_base_layer().weight, layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight


def compute_merged(layer: LoraLayer) -> None:
    """Let a layer compute, in half precision, with the merged weight that engines and checkpoints get.

    Added to the layer's output, an adapter's output would not be rounded as the merged weight is: small updates would
    reach the trainer only. Gradients are those of the unrounded weight, so updates add up until they change the rounded
    one.
    """
    kind: Any = type(layer)  # peft's, such as that of layers in 4 bits

    def forward(self: Any, x: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
        a, b = self.lora_A[_ADAPTER], self.lora_B[_ADAPTER]
        if a.weight.dtype not in (torch.bfloat16, torch.float16):
            return kind.forward(self, x, *arguments, **settings)
        value = _MergedProduct.apply(x, self)
        own = b(a(self.lora_dropout[_ADAPTER](x.detach()))) * self.scaling[_ADAPTER]
        # Only the gradients of the adapter.
        return value + (own - own.detach())

    layer.__class__ = type(kind.__name__, (kind,), {"forward": forward})


class _MergedProduct(torch.autograd.Function):
    """The product with a layer's merged weight, which is made again for the gradient, unless it is sharded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
        base = layer.get_base_layer()
        # Without ZeRO-3 the weights are whole, and this does nothing.
        with gather_params_ctx(list(layer.parameters()), modifier_rank=None):
            weight = merged_layer(layer)
            made = torch.nn.functional.linear(x, weight, base.bias)
        ctx.layer = layer
        if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            ctx.save_for_backward(weight)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = ctx.saved_tensors[0] if ctx.saved_tensors else merged_layer(ctx.layer)
        return gradient @ weight, None


def merged_layer(layer: LoraLayer) -> torch.Tensor:
    """Return a layer's weight with its adapter as a new tensor; all of its parameters must be whole."""
    _, a, b = layer_weights(layer)
    return merged_weight(layer, plain_weight(layer.get_base_layer()), a, b)


@contextmanager
def merged_as(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let layers with adapters, by their names, count as merged into these weights, which no adapter may give."""
    layers = [layer for name, layer in adapted_layers(model).items() if name in weights]
    for layer, weight in zip(layers, weights.values(), strict=True):
        layer.merged_as = weight
    try:
        yield
    finally:
        for layer in layers:
            del layer.merged_as


def merged_weight(layer: LoraLayer, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return weight + scaling * B A as a new tensor, computed in fp32 and rounded once to the weight's precision.

    Weights in double precision are merged in it.
    """
    if "merged_as" in vars(layer):
        return layer.merged_as.to(weight.dtype)
    dtype, scaling = torch.promote_types(weight.dtype, torch.float32), layer.scaling[_ADAPTER]
    with torch.no_grad():
        # In place: layers do this in every pass.
        return (b.to(dtype) @ a.to(dtype)).mul_(scaling).add_(weight).to(weight.dtype)


def merged_state_dict(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights of the bare model, under its own names, with the adapters merged into new tensors.

    What was in 4 bits is whole, and on the CPU: a GPU that holds such a model may have no room for it.

    Args:
        weights: the state dict of the model with its adapters, where the model itself holds only shards of it.
    """
    weights = model.state_dict() if weights is None else weights
    layers, in_4bit = adapted_layers(model), quantized_layers(model)
    left_out = (*(f"{name}.lora_" for name in layers), *(f"{name}.weight." for name in in_4bit))
    owners = {f"{name}.base_layer": name for name in layers}
    merged = {}
    for key, value in weights.items():
        if left_out and key.startswith(left_out):
            continue
        place, _, kind = key.rpartition(".")
        if place in in_4bit and kind == "weight":
            value = in_4bit[place].dequantized()
        name = owners.get(place, place)
        if place in owners and kind == "weight":
            a, b = (weights[f"{name}.{factor}.{_ADAPTER}.weight"] for factor in ("lora_A", "lora_B"))
            value = merged_weight(layers[name], value, a, b)
        merged[f"{name}.{kind}" if place else key] = value.cpu() if place in in_4bit else value
    return merged


def save_adapter(
    model: PreTrainedModel, folder: str | Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the adapters alone, as peft loads them on top of the original model; nothing within `merged_as`.

    Args:
        weights: as for `merged_state_dict`.
    """
    if any("merged_as" in vars(layer) for layer in adapted_layers(model).values()):
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    factors = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    in_4bit = next(iter(quantized_layers(model).values()), None)
    quantized_from = {} if in_4bit is None else {BASE_IN_4BIT: str(in_4bit.compute_dtype).removeprefix("torch.")}
    save_file(
        {f"{_SAVED_PREFIX}{name}": factor.contiguous() for name, factor in factors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt", **quantized_from},
    )
    config = copy.copy(model.peft_config[_ADAPTER])
    config.base_model_name_or_path = model.name_or_path
    config.inference_mode = True
    config.save_pretrained(folder)


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Let a model compute what it does without its adapters.

    Their products are scaled to zero, and still computed: ZeRO-3 gathers the weights of a pass in the order of the pass
    before, and no weight's need of a gradient is touched.
    """
    layers = list(adapted_layers(model).values())
    assert layers, "a model with adapters"
    scales = [layer.scaling[_ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[_ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_ADAPTER] = scale
