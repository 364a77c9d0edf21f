"""What optimizers and learning-rate schedules cannot do."""

from lmm_r1.config.shared import OptimizerConfig
from lmm_r1.errors import UserError

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
