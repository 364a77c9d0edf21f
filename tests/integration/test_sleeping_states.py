"""What a trainer keeps of its optimizer goes to host memory and back, and its updates are those of one that never slept."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed import DeepSpeedEngine
from helpers import commands_here
from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states, reload_deepspeed_states

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.host import strategy as strategy_module
from lmm_r1.host.models import whole_state_dict
from lmm_r1.host.strategy import KitStrategy, make_strategy
from lmm_r1.models.loading import DTYPES

pytestmark = pytest.mark.integration
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """DeepSpeed with this process alone, once for all tests."""
    with commands_here.one_process():
        yield


@pytest.fixture
def made(monkeypatch) -> Any:
    """A function that makes a strategy and an engine with the optimizer that GPUs get."""

    def make(flags: dict[str, Any]) -> tuple[KitStrategy, DeepSpeedEngine]:
        given = {"train.batch_size": 1, "train.micro_batch_size": 1, "ds.param_dtype": "bf16"} | flags
        strategy = make_strategy(dotted.replace(SFTConfig(), given))
        args = strategy.args
        strategy.setup_distributed()
        torch.manual_seed(0)
        # More than 4,096 numbers, of which AdamW in 8 bits leaves fewer in single precision; and a frozen layer.
        model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 96).requires_grad_(False))
        settings = {"optim": args.optim, "muon": vars(args.muon), "adam": ADAM, "max_norm": 1.0}
        schedule = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "scheduler_steps": 10}
        return strategy, strategy.prepare((model.to(DTYPES[given["ds.param_dtype"]]), settings | schedule))[0]

    monkeypatch.setattr(strategy_module, "torch_adam", lambda *, offload: {"torch_adam": True, "fused": not offload})
    return make


def updated(strategy: KitStrategy, engine: DeepSpeedEngine, *, sleeps: bool) -> list[dict[str, torch.Tensor]]:
    """Return the weights after each of some updates, between which the engine sleeps."""
    found = []
    for number in range(4):
        if sleeps:
            offload_deepspeed_states(engine)
            reload_deepspeed_states(engine)
        given = torch.randn(16, 96, generator=torch.Generator().manual_seed(number))
        strategy.backward(
            engine(given.to(next(engine.module.parameters()).dtype)).float().square().mean(), engine, None
        )
        strategy.optimizer_step(None, engine, None)
        found.append({name: weight.clone() for name, weight in whole_state_dict(engine).items()})
    return found


FLAGS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "in fp32": {"ds.param_dtype": "fp32"},
    "8 bits": {"optim": "adamw_8bit"},
    "in CPU memory": {"ds.adam_offload": True},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", FLAGS)
def test_updates_after_sleep_are_those_without_it(made, kind, stage):
    flags = FLAGS[kind] | {"ds.zero_stage": stage}
    awake, slept = (updated(*made(flags), sleeps=sleeps) for sleeps in (False, True))
    for ours, theirs in zip(slept, awake, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert (awake[0]["0.weight"] != awake[-1]["0.weight"]).any()
