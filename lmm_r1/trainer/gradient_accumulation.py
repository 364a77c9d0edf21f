"""In which precision DeepSpeed adds up the gradients of the passes of one optimizer step.

DeepSpeed 0.19.6 takes `grad_accum_dtype` as ZeRO-3 does alone. With fp32 beside weights in half precision, ZeRO-1 goes to
an optimizer that ends in an assertion on gradients of zero, and whose checkpoints are no ZeRO checkpoints (bf16), or takes
every rank's own gradients for the mean over ranks (with offloading, or in fp16); ZeRO-2 adds up in half precision all the
same. Here ZeRO's own optimizer does what it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

_WRAPPER_OF = "_do_optimizer_sanity_check"


@contextmanager
def passes_added_up() -> Iterator[None]:
    """While it is entered, engines are built with ZeRO's own optimizer at every stage."""
    engine = engine_module.DeepSpeedEngine
    choose = getattr(engine, _WRAPPER_OF)

    def choose_zero(self: Any, optimizer: Any) -> Any:
        chosen = choose(self, optimizer)
        return engine_module.ZERO_OPTIMIZATION if chosen == engine_module.BFLOAT16 else chosen

    setattr(engine, _WRAPPER_OF, choose_zero)
    try:
        yield
    finally:
        setattr(engine, _WRAPPER_OF, choose)


def add_up_in_accumulation_dtype(optimizer: Any) -> None:
    """Let an engine's optimizer of ZeRO-1 or 2 add up gradients in its accumulation precision; others do already."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or not optimizer.use_separate_grad_accum:
        return
    if optimizer.use_grad_accum_attribute:  # ZeRO-1
        # Upstream reduces a rounded copy over the ranks, and then takes the sum of one rank that it was made from.
        optimizer.get_gradient_for_reduction = optimizer.get_param_gradient_attribute
    elif optimizer.cpu_offload:
        optimizer.async_accumulate_grad_in_cpu_via_gpu = partial(_add_up_in_cpu, optimizer)
    else:
        optimizer.get_all_grad_tensors = partial(_gradients, optimizer, optimizer.get_all_grad_tensors)


def _gradients(
    optimizer: DeepSpeedZeroOptimizer,
    get: Callable[..., list[torch.Tensor]],
    weights: Sequence[torch.nn.Parameter],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return a pass's gradients of some weights; those that others are added to are in `dtype`."""
    gradients = get(weights, dtype)
    group = next(index for index, own in enumerate(optimizer.params_in_partition) if own is weights)
    added_to = optimizer.all_grad_tensors.get(group) is None and not optimizer.is_gradient_accumulation_boundary()
    return [gradient.to(dtype) for gradient in gradients] if added_to else gradients


def _add_up_in_cpu(optimizer: DeepSpeedZeroOptimizer, weight: torch.nn.Parameter) -> None:
    """Add a weight's gradient to the sum of the passes before, which waits in CPU memory, and keep the new sum there."""
    sums, number = optimizer.accumulated_grads_in_cpu, optimizer.get_param_id(weight)
    gradient = weight.grad
    assert gradient is not None, "DeepSpeed calls this when the weight has got its gradient"
    total = gradient.data.to(optimizer.gradient_accumulation_dtype).view(-1)
    if number not in sums:
        kept = torch.zeros_like(total, device=optimizer.device)
        sums[number] = kept.pin_memory() if optimizer.cpu_offload_pin_memory and torch.cuda.is_available() else kept
    if optimizer.micro_step_id > 0:
        total = total.add_(sums[number].to(total.device, non_blocking=True))
    sums[number].copy_(total, non_blocking=True)
    # What the optimizer reads after the last pass.
    gradient.data = total.view_as(weight)
