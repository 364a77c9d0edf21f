"""The check before an optimizer step: where a loss or a gradient is not finite, no rank makes it and all of them stop.

DeepSpeed 0.19.6 does not: with bf16 ZeRO-1 and 2 skip the step without a word, every time; with fp32, and with ZeRO-3,
weights become NaN, and the norm of such gradients is logged as 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad

from lmm_r1.errors import UserError

LARGEST_NORM = torch.finfo(torch.float).max ** 0.5


def check_finite(engine: DeepSpeedEngine, losses: Sequence[torch.Tensor], *, name: str) -> None:
    """Raise UserError on every rank, before any weight is changed, where the step at hand has no finite gradients.

    With fp16, an overflow of the gradients is for DeepSpeed's loss scaling to answer, until it can't lower the scale.

    Args:
        engine: after the last backward pass of an optimizer step.
        losses: of this rank's passes.
        name: whose losses, for the message.
    """
    wrong = _wrong_loss(losses)
    if wrong is not None:
        raise UserError(f"the {name}'s loss is {wrong}; {_advice(name)}")
    if _can_scale(engine):
        return
    # DeepSpeed gives -1 for what is no number. The optimizer squares gradients in single precision.
    if not all(0 <= float(norm) <= LARGEST_NORM for norm in _gradient_norms(engine)):
        raise UserError(f"the {name}'s gradients are not finite, or too large to be squared; {_advice(name)}")


def _wrong_loss(losses: Sequence[torch.Tensor]) -> str | None:
    """Return what some rank's loss is where it is not finite."""
    values = torch.stack([loss.detach().float() for loss in losses])
    flags = torch.stack([values.isnan().any(), values.isinf().any()]).int()
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    is_nan, is_inf = flags.tolist()
    return "nan" if is_nan else "inf" if is_inf else None


def _gradient_norms(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """Return the norms of the averaged gradients by groups of parameters, the same on all ranks, as DeepSpeed's step does."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        return optimizer._get_norm_groups()
    if stage == 0:
        trained = [weight for weight in engine.module.parameters() if weight.requires_grad]
        gradients = [gradient for gradient in map(safe_get_full_grad, trained) if gradient is not None]
        return [torch.linalg.vector_norm(gradient.float()) for gradient in gradients]
    if optimizer.cpu_offload:
        return [
            optimizer.complete_grad_norm_calculation_for_cpu_offload(part) for part in optimizer.params_in_partition
        ]
    return [
        optimizer.get_grad_norm_direct(optimizer.averaged_gradients[group], part)
        for group, part in enumerate(optimizer.params_in_partition)
    ]


def _can_scale(engine: DeepSpeedEngine) -> bool:
    """Say whether DeepSpeed answers an overflow with a lower loss scale."""
    if not engine.fp16_enabled():
        return False
    if engine.zero_optimization_stage() == 0:
        return True
    scaler = engine.optimizer.loss_scaler
    return scaler.dynamic and scaler.cur_scale > scaler.min_scale


def _advice(name: str) -> str:
    where, flag = ("reward, policy_loss and actor_grad_norm", "--actor.")
    if name == "critic":
        where, flag = "reward, critic_loss and critic_grad_norm", "--critic."
    elif name == "model":
        where, flag = "loss and grad_norm", "--"
    return (
        f"the step was not made, and no weight is changed by it. Look at {where} of the steps before in metrics.jsonl; "
        f"lower {flag}adam.lr, or take another --ds.param_dtype"
    )
