"""One optimizer step of any trainer: passes, their losses, the backward passes, and a step if all is finite.

A loss returns sums over its units (tokens, sequences or pairs). The update divides them by the units of all passes and
ranks, so that the step does not depend on how samples are divided into passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lmm_r1 import cpu
from lmm_r1.config.shared import OptimizerConfig
from lmm_r1.host.models import Actor
from lmm_r1.host.strategy import KitStrategy

PassT = TypeVar("PassT")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The size of a pass."""

    units: int
    """What the loss is the mean over: loss tokens, sequences with loss tokens, or pairs of responses."""
    tokens: int
    """Loss tokens."""
    samples: int


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The result of a pass; all but the losses without gradients."""

    loss: torch.Tensor
    """Summed over the pass's units."""
    aux_loss: torch.Tensor | float = 0.0
    """The load-balancing loss of experts, a mean over the pass."""
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Logged values by name, summed over units; their means over the step are logged."""
    token_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Logged values by name, summed over loss tokens."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step that was made."""

    loss: float
    """The mean over the units of all ranks."""
    means: Mapping[str, float]
    """The means of the logged values."""
    tokens: int
    """Loss tokens of all ranks."""
    computed: int
    """Tokens that the models of all ranks have computed, those without a loss, padding and repeats included."""
    rate: float
    """The learning rate."""
    grad_norm: float
    """Before clipping."""


def update(
    strategy: KitStrategy,
    model: Any,
    passes: Sequence[PassT],
    *,
    counts: Callable[[PassT], Counts],
    terms: Callable[[PassT], Terms],
    aux_weight: float = 0.0,
    name: str = "model",
) -> Step:
    """Make one optimizer step on the mean loss over the units of all passes and ranks.

    Raises UserError on every rank, before a weight changes, if a loss or a gradient is not finite.

    Args:
        model: under DeepSpeed, or the policy around it.
        passes: this rank's; every rank has as many.
        terms: runs the model on a pass.
        aux_weight: of the load-balancing loss.
        name: of the model, for errors.
    """
    engine, module = (model.model, model) if isinstance(model, Actor) else (model, model.module)
    # Ranks that share rows have the same samples and the same loss.
    group, ranks = strategy.ds_device_mesh["dp"].get_group(), strategy.ds_device_mesh["dp"].size()
    counted = [counts(one) for one in passes]
    totals = torch.tensor(
        [float(sum(one.units for one in counted)), float(sum(one.tokens for one in counted))], device=cpu.device()
    )
    dist.all_reduce(totals, group=group)
    # A step without units has losses of 0.
    units, tokens = totals.clamp(min=1)
    samples = sum(one.samples for one in counted)
    sums: dict[str, torch.Tensor] = {}
    before = module.computed_tokens
    for number, (one, its) in enumerate(zip(passes, counted, strict=True), start=1):
        # Without it, ZeRO 1 and 2 of DeepSpeed 0.19.6 drop the gradients of all passes but the last.
        engine.set_gradient_accumulation_boundary(number == len(passes))
        found = terms(one)
        loss = found.loss / units
        # DeepSpeed averages gradients over ranks.
        strategy.backward(loss * ranks + found.aux_loss * (aux_weight * its.samples / samples), model, None)
        logged = {"loss": loss.detach()}
        logged |= {key: value / units for key, value in found.sums.items()}
        logged |= {key: value / tokens for key, value in found.token_sums.items()}
        sums = {key: sums.get(key, 0.0) + value for key, value in logged.items()}
    rate = engine.get_lr()[0]
    strategy.optimizer_step(None, model, None, name=name)
    sums["computed"] = totals.new_tensor(module.computed_tokens - before)
    values = torch.stack([value.double() for value in sums.values()])
    dist.all_reduce(values, group=group)
    means = dict(zip(sums, values.tolist(), strict=True))
    return Step(
        loss=means.pop("loss"),
        computed=int(means.pop("computed")),
        means=means,
        tokens=int(totals[1]),
        rate=rate,
        grad_norm=strategy.get_grad_norm(model),
    )


def mean_of_steps(steps: Iterable[Step]) -> dict[str, float]:
    """Return the means of loss and logged values over all loss tokens of some steps, under their names."""
    weighted = [(max(step.tokens, 1), {"loss": step.loss, **step.means}) for step in steps]
    total = sum(weight for weight, _ in weighted)
    return {name: sum(weight * values[name] for weight, values in weighted) / total for name in weighted[0][1]}


def prepared(strategy: KitStrategy, model: Any, settings: OptimizerConfig, *, checkpointing: Any, steps: int) -> Any:
    """Return a model with its optimizer under DeepSpeed, which wraps all of a value model.

    Args:
        checkpointing: the settings that say whether activations are computed again.
        steps: updates of the run, which the schedule of the learning rate covers.
    """
    if checkpointing.gradient_checkpointing_enable:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing.gradient_checkpointing_reentrant})
    optimizer = {
        "optim": settings.optim,
        "muon": vars(settings.muon),
        "adam": vars(settings.adam),
        "lr_scheduler": settings.lr_scheduler,
        "lr_warmup_ratio": settings.lr_warmup_ratio,
        "min_lr_ratio": settings.min_lr_ratio,
        "max_norm": settings.max_norm,
        "scheduler_steps": steps,
    }
    return strategy.prepare((model, optimizer))[0]
