"""LoRA adapters, loaded into a model or merged into its weights, and DeepSpeed ZeRO checkpoints, read back into a model."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from lmm_r1.config.shared import LoraConfig
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import written_folder
from lmm_r1.lmm_kits import Checkpoint, LmmKit
from lmm_r1.lmm_kits.checkpoint import check_weights, settle_ends
from lmm_r1.lmm_kits.registry import kit_name_of
from lmm_r1.models.adapters import (
    BASE_IN_4BIT,
    adapted_layers,
    add_adapters,
    chosen_layers,
    dequantized_tensors,
    language_layers,
    merged_layer,
    rounded,
    stored_names,
)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER = "default"
# Settings by which peft trains more than a layer's two factors; merging supports none of them.
_BESIDE_FACTORS = ("modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters")
# Initialisations that keep the model's own weights; the others change them, and a merge would not notice.
_PLAIN_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")
_QUANTIZED_FROM = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Files of a checkpoint folder that neither the model nor its processor writes.
_COMPANIONS = ("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")


def adapter_base(adapter: Path) -> str | None:
    """Return the path or name of the model that an adapter was trained on, None if its config names none.

    Raises UserError if the folder holds no LoRA adapter.
    """
    return _adapter_settings(adapter).get("base_model_name_or_path") or None


def load_with_adapter(path: str, adapter: Path, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the kit's model at `path` with the adapter in it, unmerged, in evaluation mode.

    For an adapter that was trained on a model in 4 bits, the model's weights are rounded to those of 4 bits.
    Raises UserError if a tensor of the adapter has no place in the model, or a place gets no tensor.
    """
    settings = _adapter_settings(adapter)
    in_4bit = quantized_from(adapter)
    with _told_as_damaged(adapter):
        tensors = load_file(adapter / ADAPTER_WEIGHTS)
    checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
    is_known = _check_architecture(checkpoint, adapter)
    check_weights(path)
    model = checkpoint.load_model(dtype=dtype, attn_implementation="sdpa")
    if in_4bit is not None:
        for name in language_layers(model, checkpoint.kit):
            layer = model.get_submodule(name)
            layer.weight.data = rounded(layer.weight.data, dtype=in_4bit)
    config = _lora_config(adapter, settings)
    # Later versions of peft than the old names write theirs; an adapter with it may be that of a plain language model.
    if is_known or "peft_version" not in settings:
        tensors = _renamed(tensors, config, model)
    try:
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise UserError(f"{adapter}: does not fit {path} ({error}); give the model that it was trained on") from error
    for name, layer in adapted_layers(model).items():
        plain = type(layer) is LoraLinear and isinstance(layer.get_base_layer(), torch.nn.Linear)
        if not plain or layer.lora_variant or layer.fan_in_fan_out or any(layer.lora_bias.values()):
            raise UserError(
                f"{adapter}: layer {name} has another kind of adapter than two factors on a linear layer "
                f"({type(layer).__name__}); only LoRA and rsLoRA can be taken"
            )
    _fill(model, tensors, adapter=adapter, path=path)
    return model.eval()


def _check_architecture(checkpoint: Checkpoint, adapter: Path) -> bool:
    """Return whether the model that the adapter was trained on is available; raises UserError if it belongs to another kit.

    Small models of different architectures can have layers of the same names and shapes.
    """
    trained_on = Path(adapter_base(adapter) or "")
    if not (trained_on / "config.json").is_file():
        return False
    name = kit_name_of(str(trained_on), trust_remote_code=checkpoint.trust_remote_code)
    if name != checkpoint.kit.model_type:
        raise UserError(
            f"{adapter}: was trained on {trained_on}, whose architecture is {name}, and that of {checkpoint.path} is "
            f"{checkpoint.kit.model_type}; give the model that it was trained on"
        )
    return True


def _adapter_settings(adapter: Path) -> Mapping[str, Any]:
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


def quantized_from(adapter: Path) -> torch.dtype | None:
    """Return the precision from which the base was put in 4 bits that an adapter was trained on; None for a whole base.

    Raises UserError if the folder holds no LoRA adapter, or names no precision of weights in 4 bits.
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


def _lora_config(adapter: Path, settings: Mapping[str, Any]) -> PeftConfig:
    file = adapter / ADAPTER_CONFIG
    beside = [name for name in _BESIDE_FACTORS if settings.get(name)]
    if settings.get("bias", "none") != "none":
        beside.append("bias")
    if beside:
        raise UserError(f"{file}: {', '.join(beside)} is set, and only the factors of LoRA can be taken")
    if settings.get("init_lora_weights", True) not in _PLAIN_BEGINNINGS:
        raise UserError(
            f"{file}: init_lora_weights {settings['init_lora_weights']} changes the model's own weights; "
            "let peft convert the adapter to plain LoRA (path_initial_model_for_weight_conversion) first"
        )
    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{file}: peft cannot read this config ({error}); copy the adapter again") from error
    config.init_lora_weights = True  # every factor is overwritten; an elaborate beginning would only take time
    return config


def _renamed(
    tensors: Mapping[str, torch.Tensor], config: PeftConfig, model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors under the model's names, and let its config have them: transformers 4.52 changed many."""
    modules, own_name = dict(model.named_modules()), stored_names(model)

    def own(layer: str) -> str:
        found = own_name(f"{layer}.weight").removesuffix(".weight")
        return layer if layer in modules or found not in modules else found

    parts = {name: _bare(name).partition(".lora_") for name in tensors}
    layers = {layer: own(layer) for layer, _, _ in parts.values()}
    if isinstance(config.target_modules, str) and any(layer != found for layer, found in layers.items()):
        config.target_modules = set(layers.values())
    elif not isinstance(config.target_modules, str):
        config.target_modules = set(map(own, config.target_modules))
    for patterns in ("rank_pattern", "alpha_pattern"):
        setattr(config, patterns, {own(name): value for name, value in getattr(config, patterns).items()})
    return {f"{layers[layer]}{dot}{rest}": tensors[name] for name, (layer, dot, rest) in parts.items()}


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

    The parameters of `model` itself are rounded to `dtype`. Raises UserError if the folder cannot be written.

    Args:
        max_shard_size: the largest weight file, such as `5GB`.
        added: further tensors, such as a value head, by their names in the checkpoint.
        verify: called with the finished folder before it gets its name; if it raises, the folder is deleted.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    weights = None
    if added:
        weights = {**model.state_dict(), **{name: tensor.to(dtype) for name, tensor in added.items()}}
    settle_ends(model, kit=kit, processor=processor)
    with written_folder(output) as folder:
        model.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
        processor.save_pretrained(folder)
        if (base := Path(model.name_or_path)).is_dir():
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            patterns = (*_COMPANIONS, *(("*.py",) if "auto_map" in config else ()))
            for file in (file for pattern in patterns for file in base.glob(pattern)):
                if file.is_file() and not (folder / file.name).exists():
                    shutil.copyfile(file, folder / file.name)
        if verify is not None:
            verify(folder)


HEAD = "head.weight"  # a value head's name in training
_INNER = "model."  # in front of the names of the model inside of a value model
_WRAPPERS = ("module.", "base_model.model.")
_FACTOR = ".lora_A.default.weight"
_LATEST = "latest"
_SHARDS = "*_optim_states.pt"
# Of ZeRO 1 and 2, with the whole weights in the precision of the training.
_WHOLE = "mp_rank_00_model_states.pt"
# What torch says of an object that is not on its list.
_FORBIDDEN = re.compile(r"(?:GLOBAL|instantiate class <class ')\s*([\w.]+)")
_DAMAGED = (OSError, ValueError, KeyError, IndexError, RuntimeError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedWeights:
    """What a ZeRO checkpoint holds, in fp32 but for what was frozen, under the names of the kit's model.

    What the run had in 4 bits is whole.
    """

    folder: Path
    tensors: Mapping[str, torch.Tensor]
    head: torch.Tensor | None
    """The weight (1, H) of a critic's value head."""

    @property
    def adapted(self) -> tuple[str, ...]:
        """The names of the layers that have an adapter."""
        return tuple(name.removesuffix(_FACTOR) for name in self.tensors if name.endswith(_FACTOR))

    @property
    def rank(self) -> int:
        """Of the adapters; 0 without any."""
        return self.tensors[f"{self.adapted[0]}{_FACTOR}"].shape[0] if self.adapted else 0


def checkpoint_folder(path: Path, *, tag: str | None) -> Path:
    """Return the folder with the shards: `path` itself, or the one in it that `tag` or its file `latest` names.

    Raises UserError if there is none.
    """
    if not path.is_dir():
        raise UserError(f"--checkpoint {path}: no such folder; give what --ckpt.path named, or a folder in it")
    if tag is None and any(path.glob(_SHARDS)):
        return path
    inner = [name for name in ("_actor", "_critic") if (path / name).is_dir()]
    latest = path / _LATEST
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag is None and inner:
        raise UserError(
            f"--checkpoint {path}: holds the models {' and '.join(inner)} of an RL run; "
            f"give one of them: {' or '.join(str(path / name) for name in inner)}"
        )
    if tag is None:
        raise UserError(f"--checkpoint {path}: no file `{_LATEST}` in this folder; name a checkpoint with --tag")
    folder = path / tag
    if not any(folder.glob(_SHARDS)):
        known = sorted(child.name for child in path.iterdir() if any(child.glob(_SHARDS)))
        raise UserError(
            f"--checkpoint {path}: no ZeRO checkpoint {tag} in it (no {_SHARDS}); "
            + (f"there are {', '.join(known)}" if known else "give what --ckpt.path named")
        )
    return folder


def read_weights(folder: Path, *, trust: bool = False) -> TrainedWeights:
    """Gather a checkpoint's weights with DeepSpeed's own functions; raises UserError if shards are missing.

    Args:
        trust: load pickles that hold anything but tensors and DeepSpeed's settings, and can run code.
    """
    from lmm_r1.host.checkpoint_folder import damaged_shard
    from lmm_r1.host.models import get_fp32_state_dict_from_zero_checkpoint, only_known_objects

    try:
        # It prints its progress.
        with (
            contextlib.nullcontext() if trust else only_known_objects(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            gathered = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
            whole = {}
            if (folder / _WHOLE).is_file():
                # `only_known_objects` decides whether anything else is loaded.
                whole = torch.load(folder / _WHOLE, map_location="cpu", weights_only=False, mmap=True)["module"]
    except _DAMAGED as error:
        reason = " ".join(str(error).split())
        if isinstance(error, pickle.UnpicklingError) and (found := _FORBIDDEN.search(reason)):
            raise UserError(
                f"{folder}: its files hold {found[1]}, which is not part of a ZeRO checkpoint and could run code; if you "
                "trust who made them, add --trust_checkpoint"
            ) from error
        raise UserError(f"{folder}: this ZeRO checkpoint cannot be read ({reason}); copy it again") from error
    if (lack := damaged_shard(folder)) is not None:
        raise UserError(f"{folder}: {lack}; copy it again")
    plain = dequantized_tensors(whole)
    restored = {name: plain[name] for name in plain if plain[name] is not whole[name]}
    # DeepSpeed omits frozen weights from a stage 1 checkpoint; the file of whole weights has them.
    tensors = {_bare(name): tensor for name, tensor in {**plain, **gathered, **restored}.items()}
    head = tensors.pop(HEAD, None)
    if head is not None:
        tensors = {name.removeprefix(_INNER): tensor for name, tensor in tensors.items()}
    return TrainedWeights(folder=folder, tensors=tensors, head=head)


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def load_trained(
    path: str,
    weights: TrainedWeights,
    *,
    lora_alpha: int | None,
    use_rslora: bool = False,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Return the kit's model at `path` with a checkpoint's weights in place of its own, in evaluation mode.

    It has its adapters, unmerged. A critic's model has no output layer. Raises UserError if names or shapes
    differ, because another model was trained.

    Args:
        lora_alpha: the run's value; None if the checkpoint has no adapters.
        use_rslora: whether it divides by the root of the rank.
    """
    checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
    kit = checkpoint.kit
    check_weights(path)
    model = checkpoint.load_model(dtype=dtype, attn_implementation="sdpa")
    if weights.adapted:
        assert lora_alpha is not None, "refused by the command"
        strange = sorted(set(weights.adapted) - set(chosen_layers(model, kit, ("all-linear",))))
        if strange:
            raise _another_model(weights, path, f"no linear layer for the adapters of {listed(strange)}")
        settings = LoraConfig(
            rank=weights.rank, alpha=lora_alpha, dropout=0.0, target_modules=weights.adapted, use_rslora=use_rslora
        )
        add_adapters(model, kit, settings)
    if weights.head is not None:
        from lmm_r1.models.actor import drop_output_layer

        drop_output_layer(model)
    try:
        model.load_state_dict(weights.tensors)
    except RuntimeError as error:
        raise _another_model(
            weights, path, listed([line.strip()[:200] for line in str(error).splitlines()[1:]])
        ) from error
    return model.to(dtype).eval()


def _another_model(weights: TrainedWeights, path: str, reason: str) -> UserError:
    return UserError(
        f"{weights.folder}: does not fit --base {path}: {reason}; give the model that the run started from"
    )
