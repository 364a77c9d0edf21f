"""Loading a kit's model for training: precision, attention, packing, what is frozen, adapters, checkpointing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from lmm_r1 import cpu
from lmm_r1.errors import UserError
from lmm_r1.host.openrlhf_models import set_z3_leaf_modules
from lmm_r1.host.zero import HfDeepSpeedConfig, set_leaf_classes, weights_alone_cast
from lmm_r1.lmm_kits import Checkpoint, LmmKit
from lmm_r1.models.adapters import EVERY_LAYER, LoraSettings, add_adapters, language_layers, quantize_layers
from lmm_r1.models.buffers import (
    Buffers,
    check_buffers,
    empty_model,
    plain_buffers,
    take_stored,
)
from lmm_r1.models.image_features import GIB, KeptFeatures, keep_features
from lmm_r1.models.liger import use_liger
from lmm_r1.models.packed.attention import packing_refusal, use_packed_attention
from lmm_r1.models.rope_scaling import check_rope, settle_rope
from lmm_r1.models.vision_windows import join_windows


class _PatchProduct(torch.nn.Conv3d):
    """A convolution that takes its kernel's size as a whole; five times as fast on a CPU as PyTorch's own."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        if tuple(patches.shape[2:]) != self.kernel_size:
            return super().forward(patches)
        products = linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return products[:, :, None, None, None]


def multiply_patches(model: torch.nn.Module) -> None:
    """Let a model's three-dimensional convolutions multiply patches of their kernel's size; weights keep their names."""
    for module in model.modules():
        plain = type(module) is torch.nn.Conv3d and module.groups == 1
        if plain and module.padding == (0, 0, 0) and module.dilation == (1, 1, 1):
            module.__class__ = _PatchProduct


logger = logging.getLogger(__name__)

# Up to so many, speed is worth more than the memory that the C library holds back.
FEW_PARAMETERS = 10_000_000
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a checkpoint is loaded for training, as the flags of `--ds` say."""

    param_dtype: str
    attn_implementation: str
    experts_implementation: str | None
    packing_samples: bool
    share_prefix: bool
    freeze_visual_encoder: bool
    freeze_prefix: tuple[str, ...]
    """Of the names of weights that are not trained."""
    lora: LoraSettings | None
    ds_config: dict | None
    trust_remote_code: bool
    max_len: int | None
    """Tokens of the longest sample; None only for models whose rotary embedding does not depend on it."""
    in_4bit: bool = False
    """The language model's linear layers are kept in 4 bits."""
    use_liger: bool = True
    """Fuse norms, feed-forward layers and rotary embeddings, on GPUs where Liger's kernels run."""
    image_cache_gib: float = 0.0
    """Host memory for features of images whose weights stay as they are."""
    checkpointed_layers: int | None = None
    """With gradient checkpointing, how many of the language model's layers have it, from the first on; None is all."""
    trained: bool = True
    """Whether weights that take gradients get them."""
    empty: bool = False
    """Build the model of the checkpoint's config alone, with weights on the meta device: to plan with."""

    @classmethod
    def of(
        cls,
        *,
        attn_implementation: str,
        param_dtype: str = "bf16",
        experts_implementation: str | None = None,
        packing_samples: bool = False,
        share_prefix: bool = False,
        freeze_visual_encoder: bool = False,
        freeze_prefix: Sequence[str] = (),
        lora_rank: int = 0,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        target_modules: str | Sequence[str] = EVERY_LAYER,
        use_dora: bool = False,
        use_rslora: bool = False,
        load_in_4bit: bool = False,
        use_liger_kernel: bool = True,
        image_cache_gib: float = 0.0,
        checkpointed_layers: int | None = None,
        trained: bool = True,
        ds_config: dict | None = None,
        trust_remote_code: bool = False,
        max_len: int | None = None,
        empty: bool = False,
        **unused: Any,
    ) -> LoadSettings:
        """Return what the arguments of OpenRLHF's models say, which it hands on one by one."""
        return cls(
            param_dtype=param_dtype,
            attn_implementation=attn_implementation,
            experts_implementation=experts_implementation,
            packing_samples=packing_samples,
            share_prefix=share_prefix,
            freeze_visual_encoder=freeze_visual_encoder,
            freeze_prefix=tuple(freeze_prefix),
            lora=lora_settings(
                lora_rank,
                alpha=lora_alpha,
                dropout=lora_dropout,
                target_modules=target_modules,
                use_dora=use_dora,
                use_rslora=use_rslora,
            ),
            ds_config=ds_config,
            trust_remote_code=trust_remote_code,
            max_len=max_len,
            in_4bit=load_in_4bit,
            use_liger=use_liger_kernel,
            image_cache_gib=image_cache_gib,
            checkpointed_layers=checkpointed_layers,
            trained=trained,
            empty=empty,
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


def load_model(path: str, settings: LoadSettings) -> LoadedModel:
    """Return the checkpoint's model as `settings` say; raises UserError where it cannot be had in this way."""
    checkpoint = Checkpoint(path, trust_remote_code=settings.trust_remote_code)
    kit = checkpoint.kit
    check_rope(checkpoint.config, model=path)
    model, buffers = _built(checkpoint, settings) if settings.empty else _loaded(checkpoint, settings)
    if not settings.empty and _parameters(model) > FEW_PARAMETERS:
        cpu.return_memory()
    settle_rope(model, max_len=settings.max_len)
    multiply_patches(model)
    join_windows(model, kit)
    packs = packs_samples(model, asked=settings.packing_samples, share_prefix=settings.share_prefix)
    if settings.freeze_visual_encoder:
        freeze(model, prefixes=(*kit.vision_prefixes, *kit.projector_prefixes))
    freeze_named(model, prefixes=settings.freeze_prefix)
    if settings.use_liger and not (settings.empty or is_compiled(settings.ds_config)):
        use_liger(model)
    if settings.in_4bit:
        _quantize(model, kit, empty=settings.empty)
    if settings.lora is not None:
        _refuse_split_layers(settings.ds_config)
        # While this object lives, peft gathers the shards that DoRA's magnitudes are computed of.
        gathers = settings.lora.use_dora and is_sharded(settings.ds_config)
        sharding = HfDeepSpeedConfig(settings.ds_config) if gathers else None
        add_adapters(model, kit, settings.lora, freeze_prefix=settings.freeze_prefix)
        del sharding
    set_z3_leaf_modules(model, detect_hybrid=False)
    if kit.zero3_leaf_classes:
        set_leaf_classes(model, kit.zero3_leaf_classes)
    # Only towers and projectors are called so.
    vision = (*kit.vision_prefixes, *kit.projector_prefixes)
    frozen = bool(vision) and not any(
        v.requires_grad for name, v in model.named_parameters() if name.startswith(vision)
    )
    trains_vision = not (settings.freeze_visual_encoder or settings.lora is not None or frozen)
    keeps = not (settings.empty or is_compiled(settings.ds_config))
    limit = int(settings.image_cache_gib * GIB) if keeps else 0
    return LoadedModel(
        kit=kit,
        model=model,
        packs_samples=packs,
        share_prefix=settings.share_prefix,
        trains_vision=trains_vision,
        checkpointed_layers=settings.checkpointed_layers,
        plain_buffers=buffers,
        features=keep_features(model, kit, limit=limit, trained=settings.trained),
    )


def _parameters(model: PreTrainedModel) -> int:
    """Return how many parameters a model has, of which ZeRO-3 leaves a part here."""
    return sum(weight.ds_numel if hasattr(weight, "ds_numel") else weight.numel() for weight in model.parameters())


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


def _loaded(checkpoint: Checkpoint, settings: LoadSettings) -> tuple[PreTrainedModel, Buffers]:
    """Return a checkpoint's model with its weights, and what its buffers must stay."""
    path, kit = checkpoint.path, checkpoint.kit
    # While this object lives, transformers loads straight into ZeRO-3 shards.
    loading = HfDeepSpeedConfig(settings.ds_config) if is_sharded(settings.ds_config) else None
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
    if is_sharded(settings.ds_config):
        take_stored(model, buffers)
    check_buffers(model, buffers, when="loaded")
    return model, buffers


def lora_settings(
    rank: int,
    *,
    alpha: int,
    dropout: float,
    target_modules: str | Sequence[str],
    use_dora: bool,
    use_rslora: bool,
) -> LoraSettings | None:
    """Return what `--ds.lora.*` says, None for rank 0."""
    if not rank:
        return None
    names = (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
    return LoraSettings(
        rank=rank, alpha=alpha, dropout=dropout, target_modules=names, use_dora=use_dora, use_rslora=use_rslora
    )


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
    settings: dict[str, Any] | None = None,
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


def packs_samples(model: PreTrainedModel, *, asked: bool, share_prefix: bool) -> bool:
    """Return whether a model runs on packed sequences, and make its attention take them where it does.

    Raises UserError where packing was asked for and the model's attention cannot take it; where only shared prefixes
    would have needed it, the model runs padded, and the run warns.
    """
    if not (asked or share_prefix):
        return False
    refusal = packing_refusal(model)
    if refusal is None:
        use_packed_attention(model)
        return True
    if asked:
        raise UserError(f"--ds.packing_samples: {refusal}; leave the flag out")
    logger.warning("prompts are computed once per sample, not once per group: %s", refusal)
    return False


def _require_gradient(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    output.requires_grad_(True)


def _refuse_split_layers(ds_config: dict | None) -> None:
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
        device = torch.device("cuda", torch.cuda.current_device()) if cpu.has_cuda() else torch.device("cpu")
        quantize_layers(model, language_layers(model, kit), device=device)


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


def freeze(model: torch.nn.Module, *, prefixes: tuple[str, ...]) -> None:
    """Stop gradients of all parameters whose name begins with one of `prefixes`; raises UserError if none does."""
    names = [name for name, _ in model.named_parameters() if name.startswith(prefixes)] if prefixes else []
    if not names:
        raise UserError("--actor.freeze_visual_encoder: this model has no vision tower to freeze")
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
