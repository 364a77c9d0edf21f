"""One optimizer step over many passes, most of whose gradients vanish where they are added up in half precision.

And one of each policy loss, whose passes know what the whole step holds on all ranks.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.launched_ranks import Ranks, constant_adam, launch

# Half the distance between 1 and the next number is 2 ** -8 in bf16 and 2 ** -11 in fp16: half of that vanishes.
SMALL = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-9}
FIRST = 2.0**-4
PASSES = 16
SMALL_PASSES = 8
# Numbers in each of the two weights, which two ranks do not share evenly.
SIZES = (5, 12)


@dataclass(frozen=True, kw_only=True)
class AccumulationCase:
    """One step under DeepSpeed."""

    stage: int
    param_dtype: str
    accum_dtype: str | None = None
    """As `--ds.grad_accum_dtype`; None gives no flag."""
    offload: bool = False
    """Whether the optimizer's state is in CPU memory (`--ds.adam_offload`)."""
    zero_first: bool = False
    """Whether a step goes before whose gradients are all zero."""

    def __str__(self) -> str:
        extras = [name for name in ("offload", "zero_first") if getattr(self, name)]
        return "-".join([f"ZeRO-{self.stage}", self.param_dtype, self.accum_dtype or "default", *extras])


def sum_of(case: AccumulationCase, *, ranks: int, kept: bool) -> float:
    """Return the mean over ranks of the sum over passes; rank r's gradients are r + 1 times those of rank 0."""
    small = SMALL_PASSES * SMALL[case.param_dtype] if kept else 0.0
    return FIRST * (1 + small) * (ranks + 1) / 2


def run_accumulation(cases: Sequence[AccumulationCase], folder: Path, *, ranks: int) -> Ranks:
    """Start the processes that make the steps of all cases; `computed_by` reads what they computed."""
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    return launch("helpers.accumulated_gradients", str(folder), count=ranks, folder=folder / "logs")


@dataclass(frozen=True, kw_only=True)
class Computed:
    optimizer: str
    """The class of DeepSpeed's."""
    gradients: list[list[float]]
    """Of each step and weight, as the optimizer took it."""


def computed_by(folder: Path) -> list[Computed]:
    """Return what the processes computed for each case."""
    return [Computed(**values) for values in json.loads((folder / "computed.json").read_text())]


def policy_gradients_of(folder: Path) -> dict[str, list[float]]:
    """Return what the processes computed of policy losses: the loss and its gradients."""
    return json.loads((folder / "policy.json").read_text())


class Weights(torch.nn.Module):
    """Weights whose gradient is what the model is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(SIZES[0], dtype=dtype))
        self.second = torch.nn.Parameter(torch.zeros(SIZES[1], dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.first.float().sum() + self.second.float().sum()) * gradient


def _steps(case: AccumulationCase) -> Computed:
    from deepspeed.utils import safe_get_full_fp32_param

    from lmm_r1 import dotted
    from lmm_r1.config import SFTConfig
    from lmm_r1.host.strategy import make_strategy
    from lmm_r1.models.loading import DTYPES

    ranks = int(os.environ["WORLD_SIZE"])
    settings = {
        "train.batch_size": PASSES * ranks,
        "train.micro_batch_size": 1,
        "ds.zero_stage": case.stage,
        "ds.param_dtype": case.param_dtype,
        "ds.adam_offload": case.offload,
        "max_norm": 0.0,
        **({} if case.accum_dtype is None else {"ds.grad_accum_dtype": case.accum_dtype}),
    }
    strategy = make_strategy(dotted.replace(SFTConfig(), settings))
    strategy.setup_distributed()
    # A step of -gradient / (|gradient| + 1), without memory of the steps before.
    optimizer = constant_adam({"lr": 1.0, "betas": (0.0, 0.0), "eps": 1.0, "weight_decay": 0.0})
    engine, _, _ = strategy.prepare((Weights(DTYPES[case.param_dtype]), optimizer))
    size = SMALL[case.param_dtype]
    passes = [1.0] + [size] * SMALL_PASSES + [0.0] * (PASSES - 1 - SMALL_PASSES)
    before = [torch.zeros(size) for size in SIZES]
    steps = []
    for scale in ([0.0] if case.zero_first else []) + [FIRST, FIRST]:
        for number, value in enumerate(passes):
            engine.set_gradient_accumulation_boundary(number == PASSES - 1)
            loss = engine(torch.tensor(scale * value * (dist.get_rank() + 1)))
            strategy.backward(loss, engine, None)
        strategy.optimizer_step(None, engine, None)
        after = [safe_get_full_fp32_param(weight).float().clone() for weight in engine.module.parameters()]
        moved = [old - new for old, new in zip(before, after, strict=True)]
        assert all(float(value.min()) == float(value.max()) for value in moved), moved
        steps.append([float(value[0] / (1 - value[0])) for value in moved])
        before = after
    return Computed(optimizer=type(engine.optimizer).__name__, gradients=steps)


# Loss tokens of a step's samples, of which one has none, and how many samples each pass of each rank has.
LENGTHS = (6, 3, 0, 1, 4, 5, 2, 6)
PASSES_OF = {1: ((1, 3, 2, 2),), 2: ((1, 3), (2, 2))}


def policy_gradients() -> dict[str, list[float]]:
    """Return the loss and the gradients of one step by each policy loss and aggregation, averaged over ranks."""
    from typing import get_args

    from helpers.played_updates import PlayedEngine
    from helpers.rl_steps import random_pass
    from helpers.sessions import AccumulatingStrategy

    from lmm_r1.config.ppo import LossAggregation, PolicyLossName
    from lmm_r1.rl.losses import Correction, LossSettings, PolicyLoss, PolicyPass
    from lmm_r1.train.update import Counts, Terms, update

    ranks, rank = dist.get_world_size(), dist.get_rank()
    given, passes = random_pass(*LENGTHS), PASSES_OF[ranks]
    first = sum(map(sum, passes[:rank]))
    places = [
        range(first + sum(passes[rank][:number]), first + sum(passes[rank][: number + 1]))
        for number in range(len(passes[rank]))
    ]
    found = {}
    for loss in get_args(PolicyLossName):
        for aggregation in get_args(LossAggregation):
            correction = Correction(level="seq", mode="clip", bounds=(0.9, 1.1))
            settings = LossSettings(loss=loss, aggregation=aggregation, length=7, correction=correction)

            def counts(part: range, settings: LossSettings = settings) -> Counts:
                mask = given["mask"][list(part)]
                return Counts(units=settings.units(mask), tokens=int(mask.sum()), samples=len(part))

            def terms(part: range, settings: LossSettings = settings) -> Terms:
                taken = {name: value[list(part)] for name, value in given.items()}
                return PolicyLoss(settings)(PolicyPass(**taken), kl_weight=0.0)

            step = update(AccumulatingStrategy(), PlayedEngine(), places, counts=counts, terms=terms)
            gradient, given["log_probs"].grad = given["log_probs"].grad / ranks, None
            dist.all_reduce(gradient)
            found[f"{loss} {aggregation}"] = [step.loss, *gradient.flatten().tolist()]
    return found


def main(folder: Path) -> None:
    from lmm_r1 import cpu

    cpu.prepare_process()
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on processors that are slow in it.
    type(get_accelerator()).supported_dtypes = lambda self: [torch.float32, torch.bfloat16, torch.float16]
    type(get_accelerator()).is_fp16_supported = lambda self: True
    cases = [AccumulationCase(**values) for values in json.loads((folder / "cases.json").read_text())]
    computed = [asdict(_steps(case)) for case in cases]
    if dist.get_rank() == 0:
        (folder / "computed.json").write_text(json.dumps(computed))
    gradients = policy_gradients()
    if dist.get_rank() == 0:
        (folder / "policy.json").write_text(json.dumps(gradients))
    dist.destroy_process_group()


if __name__ == "__main__":
    importlib.import_module("helpers.accumulated_gradients").main(Path(sys.argv[1]))
