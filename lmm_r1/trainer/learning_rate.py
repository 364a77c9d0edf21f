"""The learning rate of each update: transformers' schedules, with a warm-up whose first update learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.optim.lr_scheduler import LambdaLR

# The schedule that knows no warm-up.
_CONSTANT = "constant"


def learns(scheduler: LambdaLR, *, steps: int) -> bool:
    """Say whether some of so many updates has a rate above 0."""
    pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
    return any(peak * share(made) > 0 for made in range(steps) for peak, share in pairs)


def warm_from_first_update(scheduler: LambdaLR, *, name: str, warmup: int, steps: int) -> None:
    """Let the n updates of a warm-up learn at 1/n, 2/n, ..., n/n of the peak; later updates learn as scheduled.

    transformers counts from 0, so that the first update would change nothing. The same holds after a resume: a
    checkpoint has the number of updates that were made, and the rates of the optimizer.

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
