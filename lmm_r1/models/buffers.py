"""Tensors of a model that are not trained (rotary frequencies, positions, scales), kept as a plain load makes them.

DeepSpeed rounds them if transformers loads a model into ZeRO-3 shards: rotary frequencies in bf16 are off by up to 0.4 %,
and log-probs of long sequences by tenths. `host.models.weights_alone_cast` prevents that, and every load is checked here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, build_glob_alternation, rename_source_key
from transformers.utils.generic import ContextManagers

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.checkpoint import read_tensors

Buffers = Mapping[str, torch.Tensor]
"""A model's buffers by name, persistent or not, on the CPU."""


def plain_buffers(model: PreTrainedModel, *, path: str, dtype: torch.dtype) -> Buffers:
    """Return the buffers that a plain load of the checkpoint in `dtype` gives the model.

    They are made as transformers makes them there: the model is built without memory for its weights; what the
    checkpoint holds is read from it, and the rest initialized. No HfDeepSpeedConfig may be alive.
    """
    plain = _without_memory(type(model), model.config, dtype=dtype)
    _make_buffers(plain, _stored_buffers(plain, path=path, dtype=dtype))
    return dict(plain.named_buffers())


def empty_model(
    build: type[PreTrainedModel], config: Any, *, dtype: torch.dtype, attn_implementation: str, **settings: Any
) -> PreTrainedModel:
    """Return a model of a config alone: its weights take no memory (meta device), its buffers are real.

    Args:
        settings: further ones of `from_pretrained` that a config keeps.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = attn_implementation
    if "experts_implementation" in settings:
        config._experts_implementation = settings.pop("experts_implementation")
    assert not settings, f"unknown {', '.join(settings)}"
    model = _without_memory(build, config, dtype=dtype)
    _make_buffers(model, {})
    model.tie_weights()
    return model


def _without_memory(build: type[PreTrainedModel], config: Any, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model as transformers builds it before it reads weights, all of it on the meta device."""
    context = build.get_init_context(dtype, is_quantized=False, _is_ds_init_called=False, allow_all_kernels=None)
    with ContextManagers(context):
        return build(copy.deepcopy(config))


def _make_buffers(plain: PreTrainedModel, stored: Buffers) -> None:
    """Give a model without memory its buffers: those stored in its checkpoint, and the rest initialized."""
    for name, buffer in list(plain.named_buffers()):
        module, _, own_name = name.rpartition(".")
        value = stored.get(name, torch.empty_like(buffer, device="cpu"))
        # What has this mark gets no other value.
        value._is_hf_initialized = name in stored  # type: ignore[attr-defined]
        setattr(plain.get_submodule(module), own_name, value)
    for weight in plain.parameters():
        weight._is_hf_initialized = True
    with torch.random.fork_rng(devices=()):
        plain.initialize_weights()


def _stored_buffers(model: PreTrainedModel, *, path: str, dtype: torch.dtype) -> Buffers:
    """Return the buffers that the checkpoint holds, where they may have other names, in their plain load's precision."""
    state = model.state_dict()
    made = {name: buffer for name, buffer in model.named_buffers() if name in state}
    if not made:
        return {}
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]

    def own_name(stored: str) -> str:
        return rename_source_key(stored, renamings, converters, model.base_model_prefix, state)[0]

    named = read_tensors(path, lambda stored: own_name(stored) in made)
    tensors = {own_name(name): tensor for name, tensor in named.items()}
    # Patterns of names, of what a half-precision load leaves in fp32.
    plan = model._get_dtype_plan(dtype)
    patterns, globs, _ = build_glob_alternation(list(plan)) if plan else (None, {}, {})
    precisions = {}
    for name in tensors:
        kept = patterns.search(name) if patterns is not None else None
        precisions[name] = made[name].dtype if kept is None else plan[globs[kept.lastgroup]]
    return {name: tensor.to(precisions[name]) for name, tensor in tensors.items()}


def take_stored(model: PreTrainedModel, plain: Buffers) -> None:
    """Give a model that was loaded in shards those of its plain load's buffers that a checkpoint holds.

    Transformers 5.15 reads them in the precision that they were built in there, and some stay in fp32 in a plain load.
    """
    for name in plain.keys() & model.state_dict().keys():
        module, _, own_name = name.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, own_name, plain[name].to(getattr(owner, own_name).device, copy=True))


def check_buffers(model: torch.nn.Module, plain: Buffers, *, when: str) -> None:
    """Raise UserError where a buffer of the model is not exactly that of a plain load, naming it.

    Args:
        when: what was done to the model last, for the message.
    """
    found = dict(model.named_buffers())
    for name, expected in plain.items():
        if name not in found:
            raise UserError(_message(name, when, "is missing"))
        buffer = found[name].detach().cpu()
        if buffer.dtype != expected.dtype:
            raise UserError(_message(name, when, f"is {_short(buffer.dtype)}, and {_short(expected.dtype)} there"))
        if not torch.equal(buffer, expected):
            raise UserError(_message(name, when, f"has other values: {_largest(buffer, expected)}"))


def _message(name: str, when: str, what: str) -> str:
    return (
        f"after the model was {when}, its buffer {name} is not that of a plain load of the checkpoint: it {what}. "
        "Training would compute another model than the engine; this is an error of the installed versions of DeepSpeed "
        "and transformers together, so please report it with them; --ds.zero_stage 2 may run"
    )


def _largest(buffer: torch.Tensor, expected: torch.Tensor) -> str:
    if buffer.shape != expected.shape:
        return f"the shape {tuple(buffer.shape)} in the place of {tuple(expected.shape)}"
    off = (buffer.double() - expected.double()).abs()
    place = int(off.argmax())
    return f"{buffer.flatten()[place]:.8g} in the place of {expected.flatten()[place]:.8g}, for example"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
