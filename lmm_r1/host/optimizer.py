"""DeepSpeed's optimizer step, learning-rate schedules and 8-bit Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import offload_optimizer_states, reload_optimizer_states
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import safe_get_full_grad
from torch.optim.lr_scheduler import LambdaLR

from lmm_r1 import cpu
from lmm_r1.errors import UserError

_WRAPPER_OF = "_do_optimizer_sanity_check"
LARGEST_NORM = torch.finfo(torch.float).max ** 0.5


@contextmanager
def passes_added_up() -> Iterator[None]:
    """Build engines in the block with ZeRO's own optimizer at every stage.

    DeepSpeed 0.19.6 supports `grad_accum_dtype` only with ZeRO-3. With fp32 and weights in half precision, ZeRO-1 selects
    an optimizer that fails on gradients of zero and writes no ZeRO checkpoints (bf16), or that takes each rank's own
    gradients for the mean over ranks (with offloading, or in fp16). ZeRO-2 still accumulates in half precision.
    """
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
    """Let an optimizer of ZeRO-1 or 2 accumulate gradients in its accumulation precision; others already do."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or not optimizer.use_separate_grad_accum:
        return
    if optimizer.use_grad_accum_attribute:  # ZeRO-1
        # Upstream reduces a rounded copy over the ranks, and then uses the sum of one rank.
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
    """Return a pass's gradients of some weights; those to which others are added are in `dtype`."""
    gradients = get(weights, dtype)
    group = next(index for index, own in enumerate(optimizer.params_in_partition) if own is weights)
    added_to = optimizer.all_grad_tensors.get(group) is None and not optimizer.is_gradient_accumulation_boundary()
    return [gradient.to(dtype) for gradient in gradients] if added_to else gradients


def _add_up_in_cpu(optimizer: DeepSpeedZeroOptimizer, weight: torch.nn.Parameter) -> None:
    """Add a weight's gradient to the sum of earlier passes in CPU memory."""
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


class SummedGradients(list[torch.Tensor]):
    """The sums of the gradients of a group's weights over the passes of an update, as views of one flat tensor.

    DeepSpeed hands `flat_partition` to the optimizer, instead of the copies that it makes of a plain list.
    """

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, group: int) -> None:
        weights = optimizer.round_robin_bit16_groups[group]
        sizes = [weight.numel() for weight in weights]
        self.flat_partition = torch.zeros_like(
            optimizer.single_partition_of_fp32_groups[group], dtype=optimizer.gradient_accumulation_dtype
        )
        # The rest is DeepSpeed's padding.
        parts = self.flat_partition[: sum(sizes)].split(sizes)
        super().__init__(part.view_as(weight) for part, weight in zip(parts, weights, strict=True))

    @cached_property
    def norm(self) -> torch.Tensor:
        """The Euclidean norm over all weights, in single precision; to be read after the last pass."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self, 2, dtype=torch.float)))


def add_up_on_one_rank(optimizer: Any) -> None:
    """Let an optimizer of ZeRO-2 that shares nothing with other ranks do only what mixed precision needs.

    Upstream copies each gradient into a bucket, from there into the rank's part, and all of these into a flat tensor.
    Here each gradient is added to that flat tensor as soon as it is computed, and freed. Weights in fp32 are their own
    masters. Checkpoints stay the same. Muon and offloaded optimizers work as upstream.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or not optimizer.partition_gradients:
        return
    if dist.get_world_size() > 1 or optimizer.cpu_offload or isinstance(optimizer.optimizer, MuonWithAuxAdam):
        return
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    sums: dict[int, SummedGradients] = {}
    optimizer._grad_acc_hooks = [
        weight.register_post_accumulate_grad_hook(partial(_add_gradient, optimizer, sums, group, place))
        for group, weights in enumerate(optimizer.round_robin_bit16_groups)
        for place, weight in enumerate(weights)
    ]
    optimizer.overlapping_partition_gradients_reduce_epilogue = partial(_hand_over, optimizer, sums)
    optimizer.get_grad_norm_direct = _norm_of
    optimizer.has_overflow = partial(_overflows, optimizer)
    for master, weights in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat, strict=True):
        if master.dtype == weights.dtype:
            master.data = weights.data
    optimizer._link_all_hp_params()


def _add_gradient(
    optimizer: DeepSpeedZeroOptimizer,
    sums: dict[int, SummedGradients],
    group: int,
    place: int,
    weight: torch.nn.Parameter,
) -> None:
    """Add a weight's gradient to its sum, and free it."""
    if group not in sums:
        sums[group] = SummedGradients(optimizer, group)
    assert weight.grad is not None, "PyTorch calls this when the weight has got its gradient"
    sums[group][place].add_(weight.grad)
    weight.grad = None


def _hand_over(optimizer: DeepSpeedZeroOptimizer, sums: dict[int, SummedGradients]) -> None:
    """After the last pass of an update, give the sums to the optimizer; weights without a gradient have zeros."""
    if optimizer.is_gradient_accumulation_boundary():
        for group in range(len(optimizer.bit16_groups)):
            optimizer.averaged_gradients[group] = sums.pop(group, None) or SummedGradients(optimizer, group)


def _norm_of(gradients: SummedGradients, weights: object, norm_type: float = 2) -> torch.Tensor:
    """Return the norm of a group's gradients, as DeepSpeed's step and `check_finite` ask for it."""
    assert norm_type == 2, "DeepSpeed clips by no other"
    return gradients.norm


def _overflows(optimizer: DeepSpeedZeroOptimizer, partition_gradients: bool = True) -> bool:
    """Say whether a gradient is not finite; DeepSpeed then skips the step."""
    norms = [gradients.norm for gradients in optimizer.averaged_gradients.values()]
    return not bool(torch.stack(norms).isfinite().all())


def masters(engine: DeepSpeedEngine) -> Sequence[torch.Tensor]:
    """Return this rank's master weights, flat, one tensor per group of ZeRO."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


@torch.no_grad()
def put_masters(engine: DeepSpeedEngine, values: Sequence[torch.Tensor]) -> None:
    """Replace the master weights, and update the weights of passes from them, as after a step."""
    optimizer: Any = engine.optimizer
    sharded = engine.zero_optimization_stage() == 3
    if sharded:
        # Small weights are whole on every rank, and are gathered again only if they are not.
        optimizer._partition_all_parameters()
    for part, value in zip(masters(engine), values, strict=True):
        part.data.copy_(value)
    if not sharded:
        optimizer.update_lp_params()
        return
    for group in range(len(values)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    # The copies within a node (--ds.zpg) hold the old weights.
    optimizer.invalidate_secondary_tensor()


ADAMS = (torch.optim.AdamW, DeepSpeedCPUAdam)


@contextmanager
def as_configured(engine: DeepSpeedEngine) -> Iterator[None]:
    """Keep the optimizer's own settings in a block that loads a checkpoint, which another kind of AdamW may have saved."""
    inner = engine.basic_optimizer
    settings = [{name: value for name, value in group.items() if name != "params"} for group in inner.param_groups]
    yield
    for group, own, rate in zip(inner.param_groups, settings, engine.lr_scheduler.get_last_lr(), strict=True):
        group.update(own, lr=rate)
    for weight, state in inner.state.items():
        if "step" not in state:
            continue
        if type(inner) is DeepSpeedCPUAdam:
            state["step"] = int(state["step"])
        elif type(inner) is torch.optim.AdamW:
            device = weight.device if inner.defaults["fused"] else "cpu"
            state["step"] = torch.tensor(float(state["step"]), device=device)


def sleep_with_any_optimizer(optimizer: Any) -> None:
    """Let ZeRO-3 move the states of any optimizer to host memory, as ZeRO-2 does; upstream takes only its own Adam."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.offload_states = partial(_offload, optimizer, optimizer.offload_states)
        optimizer.reload_states = partial(_reload, optimizer, optimizer.reload_states)


def _offload(optimizer: Any, offload: Callable[..., None], include: Any = None, **settings: Any) -> None:
    own = (OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states)
    offload(include=set(include or OffloadStateTypeEnum).difference(own), **settings)
    for master in optimizer.fp32_partitioned_groups_flat:
        master.data = torch.empty_like(master, device="cpu", pin_memory=cpu.has_cuda()).copy_(master)
    offload_optimizer_states(optimizer.optimizer, "cpu", pin_memory=True)
    get_accelerator().empty_cache()


def _reload(optimizer: Any, reload: Callable[..., None], **settings: Any) -> None:
    for master in optimizer.fp32_partitioned_groups_flat:
        master.data = master.data.to(get_accelerator().current_device_name())
    reload_optimizer_states(optimizer.optimizer, get_accelerator().current_device_name())
    reload(**settings)


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The state of loss scaling with fp16 (arXiv:1710.03740).

    Losses are scaled up so that small gradients are not lost. An update whose gradients overflow is skipped, and the next
    one has a lower scale.
    """

    skipped: int
    """Updates skipped since the run began."""
    scale: float

    def metrics(self, before: LossScaling | None, *, prefix: str = "") -> dict[str, float]:
        """Return the metrics of the updates since `before`, or of all updates."""
        skipped = self.skipped - (0 if before is None else before.skipped)
        return {f"{prefix}skipped_updates": float(skipped), f"{prefix}loss_scale": self.scale}


def check_finite(engine: DeepSpeedEngine, losses: Sequence[torch.Tensor], *, name: str) -> None:
    """Raise UserError on every rank, before any weight changes, if the gradients of this step are not finite.

    DeepSpeed 0.19.6 does not. With bf16, ZeRO-1 and 2 silently skip every such step. With fp32, and with ZeRO-3, weights
    become NaN, and the norm of such gradients is logged as 1.

    With fp16, DeepSpeed's loss scaling handles overflows until it cannot lower the scale any more.

    Args:
        engine: after the last backward pass of an optimizer step.
        losses: of this rank's passes.
        name: the model, for the message.
    """
    values = torch.stack([loss.detach().float() for loss in losses])
    flags = torch.stack([values.isnan().any(), values.isinf().any()]).int()
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    is_nan, is_inf = flags.tolist()
    if is_nan or is_inf:
        raise UserError(f"the {name}'s loss is {'nan' if is_nan else 'inf'}; {_ADVICE}")
    if _can_scale(engine):
        return
    # DeepSpeed returns -1 for NaN. The optimizer squares gradients in single precision.
    if not all(0 <= float(norm) <= LARGEST_NORM for norm in _gradient_norms(engine)):
        raise UserError(f"the {name}'s gradients are not finite, or too large to be squared; {_ADVICE}")


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


def loss_scaling(engine: DeepSpeedEngine) -> LossScaling | None:
    """Return an engine's state of loss scaling; None without fp16."""
    if not engine.fp16_enabled():
        return None
    return LossScaling(skipped=engine.skipped_steps, scale=float(engine.optimizer.loss_scale))


def _can_scale(engine: DeepSpeedEngine) -> bool:
    """Say whether DeepSpeed lowers the loss scale after an overflow."""
    if not engine.fp16_enabled():
        return False
    if engine.zero_optimization_stage() == 0:
        return True
    scaler = engine.optimizer.loss_scaler
    return scaler.dynamic and scaler.cur_scale > scaler.min_scale


_ADVICE = (
    "the step was not made, and no weight is changed by it. Look at reward, loss and grad_norm of the steps before in "
    "metrics.jsonl; lower adam.lr, or take another --ds.param_dtype"
)


# The schedule without a warm-up.
_CONSTANT = "constant"


def warm_from_first_update(scheduler: LambdaLR, *, name: str, warmup: int, steps: int) -> None:
    """Give the n updates of a warm-up 1/n, 2/n, ..., n/n of the peak rate; later updates follow the schedule.

    transformers counts from 0, so the first update would change nothing. The same holds after a resume: a checkpoint has
    the number of updates that were made, and the rates of the optimizer.

    Args:
        scheduler: as made for an optimizer that has not made a step.
        name: of the schedule.
        warmup: how many updates the warm-up has.
        steps: all updates of the run.
    """
    if name == _CONSTANT or not warmup:
        return
    scheduler.lr_lambdas = [
        partial(_share, scheduled, warmup=warmup, steps=steps) for scheduled in scheduler.lr_lambdas
    ]
    rates = [peak * share(0) for peak, share in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _share(scheduled: Callable[[int], float], made: int, *, warmup: int, steps: int) -> float:
    """Return the share of the peak at which the update learns that follows on `made` others."""
    if made < warmup:
        return (made + 1) / warmup
    # Some schedules divide by the number of updates that follow on the warm-up.
    return scheduled(made) if warmup < steps else 1.0


KINDS: dict[str, type[AdamW8bit | PagedAdamW8bit]] = {"adamw_8bit": AdamW8bit, "paged_adamw_8bit": PagedAdamW8bit}
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_MAKES_OPTIMIZER = "_configure_basic_optimizer"


@contextmanager
def eight_bit_adam(optim: str) -> Iterator[None]:
    """Build engines in the block with AdamW in 8 bits if `optim` names it.

    ZeRO-1, 2 and 3 let it update the flat single-precision weights that a rank owns. Raises UserError for pages on CPUs.
    """
    if optim not in KINDS:
        yield
        return
    kind = KINDS[optim]
    if kind is PagedAdamW8bit and not cpu.has_cuda():
        raise UserError(f"--optim {optim}: pages are memory that CUDA moves, and there is none here; take adamw_8bit")
    if kind not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(kind)
    engine = engine_module.DeepSpeedEngine
    make = getattr(engine, _MAKES_OPTIMIZER)

    def configure(self: Any, model_parameters: Any) -> AdamW8bit | PagedAdamW8bit:
        settings = self.optimizer_params()
        return kind(model_parameters, **{name: settings[name] for name in _SETTINGS})

    setattr(engine, _MAKES_OPTIMIZER, configure)
    try:
        yield
    finally:
        setattr(engine, _MAKES_OPTIMIZER, make)
