"""AdamW in 8 bits under DeepSpeed: its updates are bitsandbytes' own, on what ZeRO gives it."""

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from deepspeed import DeepSpeedEngine

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.host.strategy import make_strategy

ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def layer() -> torch.nn.Linear:
    """More than 4,096 numbers, of which fewer are left in single precision."""
    torch.manual_seed(0)
    return torch.nn.Linear(96, 64, bias=False)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    given = torch.randn(16, 96, generator=torch.Generator().manual_seed(step))
    return (model(given) - given[:, :64]).square().mean()


def engine_of(stage: int, optim: str) -> DeepSpeedEngine:
    flags = {"train.batch_size": 1, "train.micro_batch_size": 1, "ds.zero_stage": stage, "ds.param_dtype": "fp32"}
    flags |= {"optim": optim, **{f"adam.{name}": value for name, value in ADAM.items()}}
    strategy = make_strategy(dotted.replace(SFTConfig(), flags))
    args = strategy.args
    strategy.setup_distributed()
    settings = {"optim": optim, "muon": vars(args.muon), "adam": vars(args.adam), "max_norm": 0.0}
    schedule = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "scheduler_steps": 10}
    return strategy.prepare((layer(), settings | schedule))[0]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_updates_are_those_of_bitsandbytes_and_moments_take_a_byte_each(stage):
    engine, alone = engine_of(stage, "adamw_8bit"), layer()
    optimizer = AdamW8bit(alone.parameters(), **ADAM)
    for step in range(4):
        ours, theirs = loss_of(engine, step), loss_of(alone, step)
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
        engine.backward(ours)
        engine.step()
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
    ((state),) = [state for state in engine.optimizer.optimizer.state.values() if state]
    assert state["state1"].dtype is state["state2"].dtype is torch.uint8
    assert state["state1"].numel() == 96 * 64

    # Another optimizer in the same process is not in 8 bits.
    plain = engine_of(stage, "adam")
    plain.backward(loss_of(plain, 0))
    plain.step()
    assert type(plain.basic_optimizer) is torch.optim.AdamW
