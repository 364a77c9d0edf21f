"""Loading a kit's model: precision, attention, packing, frozen parts, adapters, checkpointing, and the buffers of a plain load."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.utils.generic import ContextManagers

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig, SupervisedConfig
from lmm_r1.config.shared import LoraConfig
from lmm_r1.errors import UserError
from lmm_r1.host.models import HfDeepSpeedConfig, set_leaf_classes, set_z3_leaf_modules, weights_alone_cast
from lmm_r1.lmm_kits import Checkpoint, LmmKit
from lmm_r1.lmm_kits.checkpoint import check_unquantized, read_tensors
from lmm_r1.models.adapters import add_adapters, language_layers, quantize_layers, stored_names
from lmm_r1.models.image_features import GIB, KeptFeatures, join_windows, keep_features, multiply_patches
from lmm_r1.models.liger import use_liger
from lmm_r1.models.packed.attention import packing_refusal, use_packed_attention
from lmm_r1.models.rope_scaling import check_rope, settle_rope

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
    own_name = stored_names(model)
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
        buffer = found[name].detach().cpu() if name in found else torch.empty(0)
        if buffer.dtype != expected.dtype or not torch.equal(buffer, expected):
            raise UserError(
                f"after the model was {when}, its buffer {name} is not that of a plain load of the checkpoint. Training "
                "would compute another model than the engine; this is an error of the installed versions of DeepSpeed and "
                "transformers together, so please report it with them; --ds.zero_stage 2 may run"
            )


logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a run loads one of its models, as its flags say."""

    attn_implementation: str
    param_dtype: str = "bf16"
    experts_implementation: str | None = None
    packing_samples: bool = False
    share_prefix: bool = False
    freeze_visual_encoder: bool = False
    freeze_prefix: tuple[str, ...] = ()
    """Prefixes of the names of weights that are not trained."""
    lora: LoraConfig = LoraConfig()
    """Rank 0 is no adapters."""
    trust_remote_code: bool = False
    max_len: int | None = None
    """Tokens of the longest sample; None only for models whose rotary embedding does not depend on it."""
    load_in_4bit: bool = False
    """The language model's linear layers are kept in 4 bits."""
    use_liger_kernel: bool = True
    """Fuse norms, feed-forward layers and rotary embeddings, on GPUs that run Liger's kernels."""
    image_cache_gib: float = 0.0
    """Host memory for features of images whose weights stay as they are."""
    checkpointed_layers: int | None = None
    """With gradient checkpointing, how many of the language model's layers have it, from the first on; None is all."""
    trained: bool = True
    """Whether weights that take gradients get them."""


Role = Literal["policy", "critic", "reference", "reward"]


def rl_settings(config: PPOConfig, role: Role) -> LoadSettings:
    """Return how an RL run loads one of its models."""
    trained, actor, ds = role in ("policy", "critic"), config.actor, config.ds
    assert ds.param_dtype is not None, "resolve_ppo fills it in"
    return LoadSettings(
        attn_implementation=ds.attn_implementation,
        param_dtype=ds.param_dtype,
        experts_implementation=ds.experts_implementation,
        packing_samples=ds.packing_samples,
        share_prefix=config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1,
        freeze_visual_encoder=actor.freeze_visual_encoder and role != "reference",
        freeze_prefix=actor.freeze_prefix,
        lora=ds.lora if trained else LoraConfig(),
        trust_remote_code=config.train.trust_remote_code,
        max_len=config.data.max_len,
        load_in_4bit=ds.load_in_4bit,
        use_liger_kernel=ds.use_liger_kernel,
        # A model that is not trained needs features again in the next epoch only.
        image_cache_gib=ds.image_cache_gib if trained or config.train.num_episodes > 1 else 0.0,
        checkpointed_layers=actor.gradient_checkpointing_layers if trained else None,
        trained=trained,
    )


def load_settings(config: SupervisedConfig, *, share_prefix: bool = False) -> LoadSettings:
    """Return how a supervised run loads a model that it does not train."""
    ds = config.ds
    assert ds.param_dtype is not None, "filled in by config.resolve"
    return LoadSettings(
        trained=False,
        image_cache_gib=ds.image_cache_gib,
        attn_implementation=ds.attn_implementation,
        param_dtype=ds.param_dtype,
        packing_samples=ds.packing_samples,
        share_prefix=share_prefix,
        experts_implementation=ds.experts_implementation,
        trust_remote_code=config.train.trust_remote_code,
        max_len=config.data.max_len,
        load_in_4bit=ds.load_in_4bit,
        use_liger_kernel=ds.use_liger_kernel,
    )


def trained_settings(config: SupervisedConfig, *, share_prefix: bool = False) -> LoadSettings:
    """Return how a supervised run loads the model that it trains."""
    return replace(
        load_settings(config, share_prefix=share_prefix),
        trained=True,
        lora=config.ds.lora,
        freeze_visual_encoder=config.model.freeze_visual_encoder,
        freeze_prefix=config.model.freeze_prefix,
        checkpointed_layers=config.model.gradient_checkpointing_layers,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A kit's model, ready for training."""

    kit: LmmKit
    model: PreTrainedModel
    packs_samples: bool
    """Whether its attention takes packed sequences."""
    share_prefix: bool
    """Whether a group's prompt is computed once in them."""
    trains_vision: bool
    """Whether gradients reach the vision tower."""
    checkpointed_layers: int | None
    """How many of the language model's layers gradient checkpointing is for; None is all."""
    plain_buffers: Buffers
    """What all of its buffers must be, whatever is done to it before training."""
    features: KeptFeatures | None
    """What keeps features of its images; None where they are made anew in each pass."""


def load_model(
    path: str, settings: LoadSettings, *, ds_config: Mapping[str, Any] | None = None, empty: bool = False
) -> LoadedModel:
    """Return the checkpoint's model as `settings` say; raises UserError if it cannot be loaded in this way.

    Args:
        ds_config: of the DeepSpeed engine that will hold it; None for a model outside of DeepSpeed.
        empty: build the model of the checkpoint's config only, with weights on the meta device: to plan with.
    """
    checkpoint = Checkpoint(path, trust_remote_code=settings.trust_remote_code)
    kit = checkpoint.kit
    check_rope(checkpoint.config, model=path)
    check_unquantized(checkpoint.config, path=path)
    model, buffers = _built(checkpoint, settings) if empty else _loaded(checkpoint, settings, ds_config=ds_config)
    settle_rope(model, max_len=settings.max_len)
    multiply_patches(model)
    join_windows(model, kit)
    share_prefix = settings.share_prefix
    if share_prefix and "shared_prefix" in kit.refusals:
        logger.warning("prompts are computed once per sample, not once per group: %s", kit.refusals["shared_prefix"])
        share_prefix = False
    packs = packs_samples(model, kit, asked=settings.packing_samples, share_prefix=share_prefix)
    if settings.freeze_visual_encoder:
        kit.check("freezing", flag=_FREEZES)
        freeze(model, prefixes=(*kit.vision_prefixes, *kit.projector_prefixes))
    freeze_named(model, prefixes=settings.freeze_prefix)
    if settings.use_liger_kernel and not (empty or is_compiled(ds_config)):
        use_liger(model)
    if settings.load_in_4bit:
        kit.check("4bit", flag="--ds.load_in_4bit")
        _quantize(model, kit, empty=empty)
    if settings.lora.rank:
        kit.check("lora", flag=f"--ds.lora.rank {settings.lora.rank}")
        _refuse_split_layers(ds_config)
        add_adapters(model, kit, settings.lora, freeze_prefix=settings.freeze_prefix)
    set_z3_leaf_modules(model, detect_hybrid=False)
    if kit.zero3_leaf_classes:
        set_leaf_classes(model, kit.zero3_leaf_classes)
    # Only towers and projectors are called so.
    vision = (*kit.vision_prefixes, *kit.projector_prefixes)
    frozen = bool(vision) and not any(
        v.requires_grad for name, v in model.named_parameters() if name.startswith(vision)
    )
    trains_vision = not (settings.freeze_visual_encoder or settings.lora.rank or frozen)
    keeps = not (empty or is_compiled(ds_config))
    limit = int(settings.image_cache_gib * GIB) if keeps else 0
    return LoadedModel(
        kit=kit,
        model=model,
        packs_samples=packs,
        share_prefix=share_prefix,
        trains_vision=trains_vision,
        checkpointed_layers=settings.checkpointed_layers,
        plain_buffers=buffers,
        features=keep_features(model, kit, limit=limit, trained=settings.trained),
    )


def _built(checkpoint: Checkpoint, settings: LoadSettings) -> tuple[PreTrainedModel, Buffers]:
    """Return a checkpoint's model without its weights, and no buffers to compare with."""
    kit, experts = checkpoint.kit, settings.experts_implementation
    model = empty_model(
        kit.model_class_of(checkpoint.config),
        checkpoint.config,
        dtype=DTYPES[settings.param_dtype],
        attn_implementation=resolve_attention(settings.attn_implementation, kit=kit),
        **({} if experts is None else {"experts_implementation": experts}),
    )
    return kit.adapt(model), {}


def _loaded(
    checkpoint: Checkpoint, settings: LoadSettings, *, ds_config: Mapping[str, Any] | None
) -> tuple[PreTrainedModel, Buffers]:
    """Return a checkpoint's model with its weights, and what its buffers must stay."""
    path, kit = checkpoint.path, checkpoint.kit
    # While this object lives, transformers loads straight into ZeRO-3 shards.
    loading = HfDeepSpeedConfig(ds_config) if is_sharded(ds_config) else None
    experts = settings.experts_implementation
    dtype = DTYPES[settings.param_dtype]
    with weights_alone_cast():
        model = checkpoint.load_model(
            dtype=dtype,
            attn_implementation=resolve_attention(settings.attn_implementation, kit=kit),
            **({} if experts is None else {"experts_implementation": experts}),
        )
    del loading
    buffers = plain_buffers(model, path=path, dtype=dtype)
    if is_sharded(ds_config):
        take_stored(model, buffers)
    check_buffers(model, buffers, when="loaded")
    return model, buffers


def is_sharded(ds_config: Mapping[str, Any] | None) -> bool:
    """Say whether weights are split over the processes, as ZeRO-3 does."""
    return ds_config is not None and ds_config["zero_optimization"]["stage"] == 3


def is_compiled(ds_config: Mapping[str, Any] | None) -> bool:
    """Say whether DeepCompile makes one graph of each pass, in which nothing is looked up."""
    return ds_config is not None and bool(ds_config.get("compile", {}).get("deepcompile"))


def enable_checkpointing(
    model: PreTrainedModel,
    *,
    kit: LmmKit,
    trains_vision: bool,
    layers: int | None = None,
    settings: dict[str, bool] | None = None,
) -> None:
    """Compute activations again in the backward pass; a frozen vision tower stays out of it.

    Args:
        layers: how many of the language model's layers do so, from the first on; None is all.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    if layers is not None:
        for layer in (language_layer_list(model, kit) or [])[layers:]:
            setattr(layer, "gradient_checkpointing", False)  # noqa: B010  # of transformers' layers
    if not trains_vision:
        # The reentrant kind needs an input that requires a gradient. Transformers hooks the inputs of all towers,
        # which would send gradients through a frozen one; the text's embeddings are enough.
        model.disable_input_require_grads()
        model.get_input_embeddings().register_forward_hook(_require_gradient)


def language_layer_list(model: torch.nn.Module, kit: LmmKit) -> torch.nn.ModuleList | None:
    """Return the list of a language model's layers, None where it is kept otherwise."""
    found = [child for child in kit.language_model_of(model).children() if isinstance(child, torch.nn.ModuleList)]
    return max(found, key=len) if found else None


def packs_samples(model: PreTrainedModel, kit: LmmKit, *, asked: bool, share_prefix: bool) -> bool:
    """Return whether a model runs on packed sequences, and make its attention take them where it does.

    Raises UserError where packing was asked for and the model's attention cannot take it; where only shared prefixes
    would have needed it, the model runs padded, and the run warns.
    """
    if not (asked or share_prefix):
        return False
    refusal = kit.refusals.get("packed") or packing_refusal(model)
    if refusal is None:
        use_packed_attention(model)
        return True
    if asked:
        raise UserError(f"--ds.packing_samples: {refusal}; leave the flag out")
    logger.warning("prompts are computed once per sample, not once per group: %s", refusal)
    return False


def _require_gradient(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    output.requires_grad_(True)


def _refuse_split_layers(ds_config: Mapping[str, Any] | None) -> None:
    pieces = 1 if ds_config is None else ds_config["tensor_parallel"]["autotp_size"]
    if pieces > 1:
        raise UserError(
            f"--ds.tensor_parallel_size {pieces} splits the layers that --ds.lora.rank adapts; leave one out"
        )


def _quantize(model: PreTrainedModel, kit: LmmKit, *, empty: bool) -> None:
    """Keep the language model's linear layers in 4 bits, on this process's device; one without memory stays as it is.

    Raises UserError for experts that are one tensor a layer: they are most of a model's weights.
    """
    for name, weight in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if name.startswith(kit.language_prefixes) and weight.dim() > 2 and not isinstance(owner, _ConvNd):
            raise UserError(
                f"--ds.load_in_4bit: the experts of this model are one tensor a layer ({name}), which bitsandbytes has no "
                "layer for; leave it out, and take --ds.lora.rank with --ds.zero_stage 3"
            )
    if not empty:
        quantize_layers(model, language_layers(model, kit), device=cpu.device())


def resolve_attention(name: str, *, kit: LmmKit) -> str:
    """Return the attention implementation for `auto`: flash-attn where it can run, PyTorch's SDPA elsewhere."""
    if name != "auto":
        return name
    if not kit.takes_flash_attention:
        return "sdpa"
    try:
        import flash_attn_2_cuda  # noqa: F401  # the compiled part; the stand-in in compat/ has none
    except ImportError:
        return "sdpa"
    return "flash_attention_2" if cpu.has_cuda() else "sdpa"


_FREEZES = "--actor.freeze_visual_encoder (in SFT --model.freeze_visual_encoder)"


def freeze(model: torch.nn.Module, *, prefixes: tuple[str, ...]) -> None:
    """Stop gradients of all parameters whose name begins with one of `prefixes`; raises UserError if none does."""
    names = [name for name, _ in model.named_parameters() if name.startswith(prefixes)] if prefixes else []
    if not names:
        raise UserError(f"{_FREEZES}: this model has no vision tower to freeze; leave it out")
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def freeze_named(model: torch.nn.Module, *, prefixes: Sequence[str]) -> None:
    """Stop gradients by `--actor.freeze_prefix`; raises UserError for a prefix of no name, or of all that is trained."""
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name, _ in model.named_parameters()):
            parts = sorted({".".join(name.split(".")[:2]) + "." for name, _ in model.named_parameters()})
            raise UserError(
                f"--actor.freeze_prefix {prefix} (in SFT --model.freeze_prefix): no weight of this model has a name that begins so; they begin with "
                f"{', '.join(parts)}"
            )
        freeze(model, prefixes=(prefix,))
    if prefixes and not any(value.requires_grad for value in model.parameters()):
        raise UserError(
            f"--actor.freeze_prefix {' '.join(prefixes)} (in SFT --model.freeze_prefix): every weight would be frozen; name fewer"
        )
