"""Checks of settings that concern a model's weights, adapters and optimizer."""

from __future__ import annotations

from lmm_r1.config.ppo import PPOConfig, PPOTrainConfig
from lmm_r1.config.shared import DeepSpeedConfig, OptimizerConfig
from lmm_r1.errors import UserError

EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
_FLAG = "--ds.load_in_4bit"


def check_adapters(ds: DeepSpeedConfig) -> None:
    """Raise UserError for kinds of adapters, or for 4 bits, without adapters, and where weights in 4 bits cannot be."""
    for name in ("use_dora", "use_rslora"):
        if getattr(ds.lora, name) and not ds.lora.rank:
            raise UserError(f"--ds.lora.{name} is a kind of LoRA; give --ds.lora.rank, too")
    if not ds.load_in_4bit:
        return
    if not ds.lora.rank:
        raise UserError(
            f"{_FLAG}: weights in 4 bits are not trained; give --ds.lora.rank for adapters on them, or leave it out"
        )
    if ds.zero_stage == 3:
        raise UserError(
            f"{_FLAG}: DeepSpeed cannot share weights in 4 bits out over GPUs; take --ds.zero_stage 2, with which each GPU "
            "has all of them in a quarter of the memory, or --ds.zero_stage 3 without 4 bits"
        )
    if ds.tensor_parallel_size > 1:
        raise UserError(
            f"{_FLAG} and --ds.tensor_parallel_size {ds.tensor_parallel_size}: a layer in 4 bits cannot be split; leave one "
            "out"
        )
    if ds.deepcompile:
        raise UserError(f"{_FLAG} and --ds.deepcompile: layers in 4 bits are not compiled; leave one out")
    if ds.use_universal_ckpt:
        raise UserError(
            f"{_FLAG} and --ds.use_universal_ckpt: universal checkpoints have no place for weights in 4 bits; resume on as "
            "many GPUs as before, without it"
        )


def check_image_cache(ds: DeepSpeedConfig) -> None:
    """Raise UserError for less memory than none."""
    if ds.image_cache_gib < 0:
        raise UserError(f"--ds.image_cache_gib {ds.image_cache_gib:g} must be 0 or more; 0 keeps nothing")


def check_eight_bit(model: OptimizerConfig, ds: DeepSpeedConfig, *, prefix: str, sleeps: bool = False) -> None:
    """Raise UserError where an optimizer's state in 8 bits could not be where other flags want it.

    Args:
        prefix: of the optimizer's flags.
        sleeps: whether the run's states wait in the host's memory while others have the GPU.
    """
    if model.optim not in EIGHT_BIT:
        return
    given = f"--{prefix}optim {model.optim}"
    if ds.adam_offload:
        raise UserError(
            f"{given} and --ds.adam_offload: DeepSpeed keeps the state of its own AdamW alone in CPU memory; take "
            f"--{prefix}optim adam with it, or leave it out"
        )
    if ds.zero_stage == 0:
        raise UserError(f"{given} is for --ds.zero_stage 1, 2 and 3; take one of them, or --{prefix}optim adam")
    if sleeps:
        raise UserError(
            f"{given} and --ds.enable_sleep: DeepSpeed moves the state of AdamW alone to the host's memory; take "
            f"--{prefix}optim adam with it, or leave it out"
        )


def why_not_during_generation(config: PPOConfig) -> str | None:
    """Return why the reference cannot compute log-probs while groups are generated; None where it can."""
    if config.algo.kl.init_coef <= 0:
        return f"with --algo.kl.init_coef {config.algo.kl.init_coef:g} there is no reference model"
    if not config.train.async_enable:
        return None
    if config.train.colocate_all or config.train.colocate_actor_ref:
        return "with --train.async_enable the policy is updated during generation, on the GPUs of the reference"
    if config.ref.refresh_steps:
        return "with --train.async_enable and --ref.refresh_steps the next rollout begins before the reference is refreshed"
    return None


def check_reference(config: PPOConfig) -> None:
    """Raise UserError for a reference that could not follow the policy, or run when it is to."""
    why = why_not_during_generation(config)
    if config.ref.during_generation and why is not None:
        raise UserError(f"--ref.during_generation: {why}; leave it out")
    steps = config.ref.refresh_steps
    given = f"--ref.refresh_steps {steps}"
    if steps < 0:
        raise UserError(f"{given} must be at least 1, or 0 for a reference that stays as it is")
    if steps == 0:
        return
    if config.algo.kl.init_coef <= 0:
        raise UserError(f"{given}: with --algo.kl.init_coef {config.algo.kl.init_coef:g} there is no reference model")
    if config.ds.load_in_4bit:
        raise UserError(f"{given}: with --ds.load_in_4bit the reference is in 4 bits, and takes no other weights")
    if config.ds.tensor_parallel_size > 1:
        raise UserError(
            f"{given}: with --ds.tensor_parallel_size {config.ds.tensor_parallel_size} no rank has the policy's weights whole; "
            "leave one out"
        )


def check_average(config: PPOConfig) -> None:
    """Raise UserError for a moving average that nothing would be averaged in."""
    train = config.train
    if not train.enable_ema:
        if train.ema_beta != PPOTrainConfig.ema_beta:
            raise UserError(f"--train.ema_beta {train.ema_beta:g} has no part without --train.enable_ema; add it")
        return
    if not 0 < train.ema_beta < 1:
        raise UserError(f"--train.ema_beta {train.ema_beta:g} must be above 0 and below 1")
    if config.ds.zero_stage == 0:
        raise UserError(
            "--train.enable_ema averages the optimizer's weights in single precision, which --ds.zero_stage 0 does not keep; "
            "take 1, 2 or 3"
        )
    if config.ds.use_universal_ckpt:
        raise UserError("--train.enable_ema: a universal checkpoint (--ds.use_universal_ckpt) holds no moving average")


def check_fp16_optimizer(model: OptimizerConfig, ds: DeepSpeedConfig, *, prefix: str) -> None:
    """Raise UserError for an optimizer that makes no right updates of scaled losses."""
    if ds.param_dtype == "fp16" and model.optim == "muon":
        raise UserError(
            f"--{prefix}optim muon with --ds.param_dtype fp16: DeepSpeed divides Muon's updates, which have the length of no "
            f"gradient, by the scale of the loss; take --ds.param_dtype bf16, or --{prefix}optim adam"
        )


SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "polynomial",
)
"""Names of transformers' schedules that need nothing but the number of updates."""
_SCHEDULES_WITH_END = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
# Where transformers' polynomial ends, which has to lie below the peak.
_POLYNOMIAL_END = 1e-7


def check_optimizer(model: OptimizerConfig, *, prefix: str) -> None:
    """Raise UserError for settings of the optimizer or its schedule that have no effect, or no meaning."""
    if model.muon.ns_steps < 1:
        raise UserError(f"--{prefix}muon.ns_steps {model.muon.ns_steps} must be at least 1")
    for name, rate in (("adam.lr", model.adam.lr), ("muon.lr", model.muon.lr)):
        if rate < 0:
            raise UserError(f"--{prefix}{name} {rate:g} must not be negative")
    _check_schedule(model, prefix=prefix)


def _check_schedule(model: OptimizerConfig, *, prefix: str) -> None:
    flag = f"--{prefix}lr_scheduler {model.lr_scheduler}"
    if model.lr_scheduler not in SCHEDULES:
        raise UserError(f"{flag} is not one of {', '.join(SCHEDULES)}")
    if not 0 <= model.lr_warmup_ratio <= 1:
        raise UserError(f"--{prefix}lr_warmup_ratio {model.lr_warmup_ratio:g} must be between 0 and 1")
    if model.min_lr_ratio != OptimizerConfig.min_lr_ratio and model.lr_scheduler not in _SCHEDULES_WITH_END:
        raise UserError(
            f"--{prefix}min_lr_ratio {model.min_lr_ratio:g} has no part in {flag}; "
            f"take {' or '.join(_SCHEDULES_WITH_END)}, or leave it out"
        )
    if model.lr_scheduler == "polynomial" and model.adam.lr <= _POLYNOMIAL_END:
        raise UserError(
            f"{flag} ends at {_POLYNOMIAL_END:g}, which --{prefix}adam.lr {model.adam.lr:g} must be above; take linear"
        )


def check_vision_lr(optim: str, vision_lr: float | None, *, prefix: str) -> None:
    """Raise UserError for a learning rate of the vision tower that has no effect."""
    if vision_lr is None:
        return
    if vision_lr < 0:
        raise UserError(f"--{prefix}adam.vision_lr {vision_lr:g} must not be negative")
    if optim == "muon":
        raise UserError(
            f"--{prefix}adam.vision_lr {vision_lr:g} needs --{prefix}optim adam: DeepSpeed's Muon makes its own groups"
        )
