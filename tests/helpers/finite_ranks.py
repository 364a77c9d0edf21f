"""Optimizer steps with a gradient, a loss or an advantage that is no number, by processes over gloo."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _with_a_wrong_advantage(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """OpenRLHF's loss of twelve tokens, of which one has no number for an advantage."""
    from openrlhf.models.loss import PolicyLoss

    advantages = torch.ones(3, 4)
    advantages[1, 2] = torch.nan
    log_probs = -weight.square().expand(3, 4)
    return loss + PolicyLoss()(log_probs, log_probs.detach(), advantages, action_mask=torch.ones(3, 4))[0]


# What one rank's loss is made to be; of "gradient", the loss itself is finite.
PLANTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda loss, weight: loss,
    "nan advantage": _with_a_wrong_advantage,
    "inf loss": lambda loss, weight: loss + torch.inf,
    # The derivative of a root at 0 is infinite, and times 0 no number.
    "nan gradient": lambda loss, weight: loss + (0 * weight).sum().sqrt(),
    # Its square is too large for single precision.
    "large gradient": lambda loss, weight: loss + 1e25 * weight.sum() / 1e3,
}
# In the place of what is planted: what follows the weights of good steps, as `helpers.finite_ranks` has it.
FOLLOWED = "followed"
# Stage, dtype and what is planted.
CASES: list[tuple[int, str, str]] = [
    *[(stage, "bf16", planted) for stage in (1, 2, 3) for planted in PLANTED],
    *[(stage, "fp32", planted) for stage in (1, 2, 3) for planted in ("nothing", "nan gradient")],
    *[(stage, dtype, FOLLOWED) for stage in (1, 2, 3) for dtype in ("bf16", "fp32")],
    *[(stage, "fp16", planted) for stage in (1, 2, 3) for planted in ("nothing", "nan advantage", "large gradient")],
]
Outcome = dict[str, Any]


def outcome_of(stage: int, dtype: str, planted: str, *, folder: Path) -> Outcome:
    """Make a good step, then two passes of a step of which the last rank's first is planted with something.

    Args:
        folder: that all ranks write to.
    """
    import deepspeed

    if planted == FOLLOWED:
        return averaged(stage, dtype, folder / f"{stage}-{dtype}")

    from lmm_r1.host.optimizer import loss_scaling

    strategy, engine = prepared(stage, dtype)
    backward_pass(strategy, engine, "nothing")
    strategy.optimizer_step(None, engine, None, name="actor")
    before = weights_of(engine)
    last = dist.get_rank() == dist.get_world_size() - 1
    error = None
    engine.set_gradient_accumulation_boundary(False)
    backward_pass(strategy, engine, planted if last else "nothing")
    engine.set_gradient_accumulation_boundary(True)
    backward_pass(strategy, engine, "nothing")
    try:
        strategy.optimizer_step(None, engine, None, name="actor")
    except ValueError as raised:
        error = str(raised)
    after = weights_of(engine)
    deepspeed.comm.barrier()
    scaling = loss_scaling(engine)
    told = {} if scaling is None else scaling.metrics(None)
    return {"error": error, "same": torch.equal(before, after), **told}


def prepared(stage: int, dtype: str, *, persistent: bool = False) -> tuple[Any, Any]:
    """Return a strategy and an engine of a small model.

    Args:
        persistent: whether ZeRO-3 keeps weights whole on every rank, as it does with small ones.
    """
    import deepspeed

    from lmm_r1 import dotted
    from lmm_r1.config import SFTConfig
    from lmm_r1.host.optimizer import add_up_in_accumulation_dtype, passes_added_up
    from lmm_r1.host.strategy import make_strategy

    settings = {
        "train.batch_size": int(os.environ["WORLD_SIZE"]),
        "train.micro_batch_size": 1,
        "ds.param_dtype": dtype,
        # As the trainers resolve it.
        "ds.grad_accum_dtype": "fp32",
    }
    strategy = make_strategy(dotted.replace(SFTConfig(), settings | {"ds.zero_stage": stage}))
    strategy.setup_distributed()
    torch.manual_seed(0)
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    config = strategy.get_ds_train_config(optimizer, max_norm=1.0)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 32 if persistent else 0
    if dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 4, "hysteresis": 1}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    with passes_added_up():
        engine, *_ = deepspeed.initialize(model=model, config=config)
    add_up_in_accumulation_dtype(engine.optimizer)
    return strategy, engine


def backward_pass(strategy: Any, engine: Any, planted: str) -> None:
    given = torch.arange(8.0).sin().to(next(engine.module.parameters()).dtype)
    output = engine(given[None])
    strategy.backward(PLANTED[planted](output.float().square().sum(), engine.module[1].bias.float()), engine, None)


def weights_of(engine: Any) -> torch.Tensor:
    """All weights and, in mixed precision, the optimizer's own of them."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        own = [weight.detach().flatten().float().clone() for weight in parameters]
    masters = [safe_get_full_fp32_param(weight) for weight in parameters]
    return torch.cat([*own, *(master.detach().flatten().clone() for master in masters if master is not None)])


def main(folder: Path) -> None:
    from lmm_r1 import cpu

    cpu.prepare_process()
    # DeepSpeed asks for instructions that make half precision quick.
    importlib.import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: True
    outcomes = [outcome_of(*case, folder=folder) for case in json.loads((folder / "cases.json").read_text())]
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


BETA = 0.75


def masters_of(engine: Any) -> list[torch.Tensor]:
    """The optimizer's weights in single precision, whole, by DeepSpeed's own way to them."""
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(weight).clone() for weight in engine.module.parameters()]


def whole_of(engine: Any) -> list[torch.Tensor]:
    """The weights of passes, whole on every rank."""
    import deepspeed

    weights = []
    for weight in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([weight]):
            weights.append(weight.data.clone())
    return weights


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def step(strategy: Any, engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(True)
    backward_pass(strategy, engine, "nothing")
    strategy.optimizer_step(None, engine, None, name="actor")


def averaged(stage: int, dtype: str, folder: Path) -> dict[str, bool]:
    """Make two updates, and compare the average with one of whole weights."""
    from lmm_r1.train.publication import MovingAverage

    folder.mkdir(exist_ok=True)
    strategy, engine = prepared(stage, dtype, persistent=dtype == "bf16")
    average = MovingAverage(engine, beta=BETA)
    expected = masters_of(engine)
    first = expected
    for _ in range(2):
        step(strategy, engine)
        average.update()
        expected = [own.lerp(weight, 1 - BETA) for own, weight in zip(expected, masters_of(engine), strict=True)]
    rounded = [value.to(weight.dtype) for value, weight in zip(expected, engine.module.parameters(), strict=True)]
    weights, masters = whole_of(engine), masters_of(engine)
    with average.in_weights():
        inside = whole_of(engine)
    engine.save_checkpoint(str(folder.parent), tag=folder.name)
    average.save(folder)
    again = MovingAverage(engine, beta=BETA)
    again.load(folder)
    with again.in_weights():
        loaded = whole_of(engine)
    outcome = {
        "moved": not same(expected, first) and not same(inside, weights),
        "averaged": same(inside, rounded),
        "saved": same(loaded, rounded),
        "put back": same(whole_of(engine), weights) and same(masters_of(engine), masters),
    }
    step(strategy, engine)
    outcome["goes on"] = not same(whole_of(engine), weights)
    return outcome


if __name__ == "__main__":
    importlib.import_module("helpers.finite_ranks").main(Path(sys.argv[1]))
