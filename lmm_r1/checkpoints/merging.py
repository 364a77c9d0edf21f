"""LoRA adapters of a file on a kit's model, merged into its weights, and the checkpoint folder that comes of it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.variants import DoraLinearVariant
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import written_folder
from lmm_r1.lmm_kits import Checkpoint, LmmKit
from lmm_r1.lmm_kits.registry import kit_name_of
from lmm_r1.lmm_kits.weight_files import check_weights
from lmm_r1.models.adapters import BASE_IN_4BIT, adapted_layers, language_layers, merged_layer, rounded

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER = "default"
# What peft can train beside a layer's two factors and magnitudes, by its name in the config; merging knows none of it.
_BESIDE_FACTORS = ("modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters")
# Ways to begin that leave the model's own weights as they are; the others change them, and a merge would miss it.
_PLAIN_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")
_QUANTIZED_FROM = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# What a checkpoint folder may hold that neither the model nor its processor writes.
_COMPANIONS = ("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")


def adapter_base(adapter: Path) -> str | None:
    """Return the path or name of the model that an adapter was trained on, None where its config names none.

    Raises UserError where the folder holds no LoRA adapter.
    """
    return _adapter_settings(adapter).get("base_model_name_or_path") or None


def load_with_adapter(path: str, adapter: Path, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the kit's model at `path` with the adapter in it, unmerged, in evaluation mode.

    One that was trained on a model in 4 bits gets a model whose weights are what those stand for.
    Raises UserError where a tensor of the adapter has no place in the model, or a place got no tensor.
    """
    settings = _adapter_settings(adapter)
    tensors, in_4bit = _adapter_tensors(adapter), quantized_from(adapter)
    checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
    _check_architecture(checkpoint, adapter)
    check_weights(path)
    model = checkpoint.load_model(dtype=dtype, attn_implementation="sdpa")
    if in_4bit is not None:
        for name in language_layers(model, checkpoint.kit):
            layer = model.get_submodule(name)
            layer.weight.data = rounded(layer.weight.data, dtype=in_4bit)
    config = _lora_config(adapter, settings)
    try:
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise UserError(f"{adapter}: does not fit {path} ({error}); give the model that it was trained on") from error
    for name, layer in adapted_layers(model).items():
        plain = type(layer) is LoraLinear and isinstance(layer.get_base_layer(), torch.nn.Linear)
        known = all(type(variant) is DoraLinearVariant for variant in layer.lora_variant.values())
        if not (plain and known) or layer.fan_in_fan_out or any(layer.lora_bias.values()):
            raise UserError(
                f"{adapter}: layer {name} has another kind of adapter than two factors on a linear layer "
                f"({type(layer).__name__}); only LoRA, rsLoRA and DoRA can be taken"
            )
    _fill(model, tensors, adapter=adapter, path=path)
    return model.eval()


def _check_architecture(checkpoint: Checkpoint, adapter: Path) -> None:
    """Raise UserError where the model that the adapter was trained on is at hand, and is of another kit.

    Small models of different architectures can have layers of the same names and shapes.
    """
    trained_on = Path(adapter_base(adapter) or "")
    if not (trained_on / "config.json").is_file():
        return
    name = kit_name_of(str(trained_on), trust_remote_code=checkpoint.trust_remote_code)
    if name != checkpoint.kit.model_type:
        raise UserError(
            f"{adapter}: was trained on {trained_on}, whose architecture is {name}, and that of {checkpoint.path} is "
            f"{checkpoint.kit.model_type}; give the model that it was trained on"
        )


def _adapter_settings(adapter: Path) -> dict[str, Any]:
    if not adapter.is_dir():
        raise UserError(f"{adapter}: no such folder; give the folder of a LoRA adapter")
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (adapter / name).is_file():
            raise UserError(f"{adapter}: no {name} in this folder; is it an adapter in peft's format?")
    file = adapter / ADAPTER_CONFIG
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}); copy the adapter again") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise UserError(f"{file}: not the config of a LoRA adapter (peft_type is not LORA); only LoRA can be taken")
    return settings


def _adapter_tensors(adapter: Path) -> dict[str, torch.Tensor]:
    with _told_as_damaged(adapter):
        return load_file(adapter / ADAPTER_WEIGHTS)


def quantized_from(adapter: Path) -> torch.dtype | None:
    """Return the precision from which the base was put in 4 bits that an adapter was trained on; None for a whole base.

    Raises UserError where the folder holds no LoRA adapter, or names no precision of weights in 4 bits.
    """
    _adapter_settings(adapter)
    with _told_as_damaged(adapter), safe_open(adapter / ADAPTER_WEIGHTS, framework="pt") as file:
        name = (file.metadata() or {}).get(BASE_IN_4BIT)
    if name is not None and name not in _QUANTIZED_FROM:
        raise UserError(
            f"{adapter / ADAPTER_WEIGHTS}: its base was in 4 bits, rounded from {name}; known are "
            f"{', '.join(_QUANTIZED_FROM)}"
        )
    return None if name is None else _QUANTIZED_FROM[name]


@contextlib.contextmanager
def _told_as_damaged(adapter: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(f"{adapter / ADAPTER_WEIGHTS}: the weight file is damaged ({error}); copy it again") from error


def _lora_config(adapter: Path, settings: Mapping[str, Any]) -> LoraConfig:
    file = adapter / ADAPTER_CONFIG
    beside = [name for name in _BESIDE_FACTORS if settings.get(name)]
    if settings.get("bias", "none") != "none":
        beside.append("bias")
    if beside:
        raise UserError(f"{file}: {', '.join(beside)} is set, and only the factors of LoRA and DoRA can be taken")
    if settings.get("init_lora_weights", True) not in _PLAIN_BEGINNINGS:
        raise UserError(
            f"{file}: init_lora_weights {settings['init_lora_weights']} changes the model's own weights; "
            "let peft convert the adapter to plain LoRA (path_initial_model_for_weight_conversion) first"
        )
    try:
        config = LoraConfig.from_pretrained(str(adapter))
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{file}: peft cannot read this config ({error}); copy the adapter again") from error
    config.init_lora_weights = True  # every factor is overwritten; an elaborate beginning would only take time
    return config


def _fill(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], *, adapter: Path, path: str) -> None:
    """Load an adapter's tensors; raises UserError unless tensors and places match one to one."""
    advice = "give the model that it was trained on"
    try:
        result = set_peft_model_state_dict(model, dict(tensors), adapter_name=_ADAPTER)
    except RuntimeError as error:
        wrong = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if not wrong:
            raise
        raise UserError(f"{adapter}: does not fit {path}: {listed(wrong)} {advice}") from error
    if result.unexpected_keys:
        raise UserError(
            f"{adapter}: {path} has no place for {len(result.unexpected_keys)} of its {len(tensors)} tensors "
            f"({listed(result.unexpected_keys)}); {advice}"
        )
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing:
        raise UserError(
            f"{adapter}: tensors are missing for {len(missing)} places of {path} ({listed(missing)}); "
            f"copy the adapter again, or {advice}"
        )


def listed(names: Sequence[str], *, most: int = 3) -> str:
    """Return some names for a message: `a, b, c and 4 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def merge_adapter(model: PreTrainedModel) -> None:
    """Merge the adapters of a model into its weights, in place, and take them out; in fp32 or the weights' own fp64."""
    for name, layer in adapted_layers(model).items():
        bare = layer.get_base_layer()
        bare.weight.data = merged_layer(layer)
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, bare)
    if hasattr(model, "peft_config"):
        del model.peft_config
    assert not adapted_layers(model)


def write_checkpoint(
    model: PreTrainedModel,
    *,
    kit: LmmKit,
    processor: Any,
    output: Path,
    dtype: torch.dtype,
    max_shard_size: str = "5GB",
    added: Mapping[str, torch.Tensor] | None = None,
    verify: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint that transformers, vLLM and every command here load; `output` is complete or not there.

    The parameters of `model` itself are rounded to `dtype`. Raises UserError where the folder cannot be written.

    Args:
        max_shard_size: the largest weight file, such as `5GB`.
        added: tensors beside the model's own, under their names in the checkpoint, such as a value head.
        verify: called with the finished folder before it gets its name; what it raises leaves nothing behind.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    weights = None
    if added:
        weights = {**model.state_dict(), **{name: tensor.to(dtype) for name, tensor in added.items()}}
    with written_folder(output) as folder:
        model.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
        kit.save_processor(processor, folder)
        _copy_companions(model.name_or_path, folder)
        if verify is not None:
            verify(folder)


def _copy_companions(base: str, folder: Path) -> None:
    """Copy what a checkpoint folder has beside weights, config and processor: its licence, and the code it brings."""
    if not Path(base).is_dir():
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    patterns = (*_COMPANIONS, *(("*.py",) if "auto_map" in config else ()))
    for file in (file for pattern in patterns for file in Path(base).glob(pattern)):
        if file.is_file() and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
