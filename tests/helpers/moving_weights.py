"""What follows a model's weights, in each of its ranks: their average over updates, and a reference that takes them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers.finite_ranks import backward_pass, prepared

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
    from lmm_r1.lifecycle.publication import MovingAverage

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
        **referred(strategy, engine, folder),
    }
    step(strategy, engine)
    outcome["goes on"] = not same(whole_of(engine), weights)
    return outcome


def referred(strategy: Any, engine: Any, folder: Path) -> dict[str, bool]:
    """Give a reference, which begins with other weights, those of the policy."""
    import deepspeed

    from lmm_r1.rl.resume import load_reference, reference_file, write_reference

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    reference, *_ = deepspeed.initialize(model=model, config=strategy.get_ds_eval_config())
    before, policy = whole_of(reference), whole_of(engine)
    file = reference_file(folder, 3)
    write_reference(SimpleNamespace(model=engine), file)
    forgotten: list[bool] = []
    load_reference(SimpleNamespace(model=reference, forget_features=lambda: forgotten.append(True)), file)
    assert forgotten == [True], "what an earlier reference made of images is not the new one's"
    given = torch.arange(8.0)[None].to(policy[0].dtype)
    same_output = torch.equal(reference(given), engine(given))
    dist.barrier()
    return {"referred": not same(before, policy) and same(whole_of(reference), policy) and same_output}
