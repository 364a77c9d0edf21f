"""LoRA: which layers of a model get an adapter, and what the model weighs with its adapters merged in.

Adapters are put into the model itself, without a wrapper: every parameter that was there keeps its name, but for
`.base_layer` behind the name of an adapted layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit

EVERY_LAYER = "all-linear"
ADAPTER_FOLDER = "adapter"
_ADAPTER = "default"  # peft's name of a model's only adapter
_SAVED_PREFIX = "base_model.model."  # in front of every name in peft's files


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What `--ds.lora.*` says."""

    rank: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]
    """Ends of names, such as `q_proj` or `self_attn.q_proj`; `("all-linear",)` takes every linear layer."""


def add_adapters(
    model: PreTrainedModel, kit: LmmKit, settings: LoraSettings, *, freeze_prefix: tuple[str, ...] = ()
) -> None:
    """Give the language model's linear layers adapters and freeze everything else; raises UserError for bad settings.

    Args:
        freeze_prefix: layers under these names get none.
    """
    _check(settings)
    names = chosen_layers(model, kit, settings.target_modules)
    names = [name for name in names if not f"{name}.weight".startswith(freeze_prefix)]
    if not names:
        raise UserError(
            f"--actor.freeze_prefix {' '.join(freeze_prefix)} (in SFT --model.freeze_prefix): every layer that "
            "--ds.lora.target_modules adapts is under it, and nothing would be trained; leave one out"
        )
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=names,
        bias="none",
    )
    inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    # peft looks for ends of names, and shortens a long list to such ends.
    assert list(adapted_layers(model)) == names, "peft adapted other layers than those asked for"


def chosen_layers(model: PreTrainedModel, kit: LmmKit, target_modules: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that get an adapter; raises UserError for a target that is none of them."""
    layers = _language_layers(model, kit)
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


def _language_layers(model: PreTrainedModel, kit: LmmKit) -> list[str]:
    output_layer = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not output_layer
        and f"{name}.weight".startswith(kit.language_prefixes)
        and not f"{name}.weight".startswith(kit.untrained_prefixes)
    ]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check(settings: LoraSettings) -> None:
    if settings.rank < 1:
        raise UserError(f"--ds.lora.rank {settings.rank}: must be at least 1, or 0 to train without LoRA")
    if settings.alpha < 1:
        raise UserError(f"--ds.lora.alpha {settings.alpha}: must be at least 1; the adapters would do nothing")
    if not 0 <= settings.dropout < 1:
        raise UserError(f"--ds.lora.dropout {settings.dropout:g}: must be at least 0 and below 1")
    if not settings.target_modules:
        raise UserError(f"--ds.lora.target_modules: give names of layers, or {EVERY_LAYER}")


def adapted_layers(model: torch.nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with an adapter by their name in the bare model; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def layer_weights(layer: LoraLayer) -> tuple[torch.nn.Parameter, torch.nn.Parameter, torch.nn.Parameter]:
    """Return a layer's own weight (N, M) and its adapter's two factors, A (R, M) and B (N, R)."""
    return layer.get_base_layer().weight, layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight


def merged_weight(layer: LoraLayer, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return weight + scaling * B A as a new tensor, computed in fp32 and rounded once to the weight's precision.

    Weights in double precision are merged in it.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    with torch.no_grad():
        return (weight.to(dtype) + layer.scaling[_ADAPTER] * (b.to(dtype) @ a.to(dtype))).to(weight.dtype)


def merged_state_dict(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights of the bare model, under its own names, with the adapters merged into new tensors.

    Args:
        weights: the state dict of the model with its adapters, where the model itself holds only shards of it.
    """
    weights = model.state_dict() if weights is None else weights
    layers = adapted_layers(model)
    adapters = tuple(f"{name}.lora_" for name in layers)
    owners = {f"{name}.base_layer": name for name in layers}
    merged = {}
    for key, value in weights.items():
        if key.startswith(adapters):
            continue
        place, _, kind = key.rpartition(".")
        if place not in owners:
            merged[key] = value
            continue
        name = owners[place]
        if kind == "weight":
            a, b = (weights[f"{name}.{factor}.{_ADAPTER}.weight"] for factor in ("lora_A", "lora_B"))
            value = merged_weight(layers[name], value, a, b)
        merged[f"{name}.{kind}"] = value
    return merged


def save_adapter(
    model: PreTrainedModel, folder: str | Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the adapters alone, as peft loads them on top of the original model.

    Args:
        weights: as for `merged_state_dict`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    factors = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    save_file(
        {f"{_SAVED_PREFIX}{name}": factor.contiguous() for name, factor in factors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
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
