"""The rate at which each update learns, as the weights show it: warm-ups begin at 1/n, and a resumed run goes on."""

from typing import Any

import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.host.strategy import KitStrategy, make_strategy

pytestmark = pytest.mark.usefixtures("one_process")

PEAK = 1e-2


class Sum(torch.nn.Module):
    """Its gradient is 1 in every update, so that AdamW moves each weight by the learning rate itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def made(*, steps: int, zero_stage: int = 2, lr: float = PEAK, **schedule: Any) -> tuple[KitStrategy, DeepSpeedEngine]:
    given = {"train.batch_size": 1, "train.micro_batch_size": 1, "ds.param_dtype": "fp32", "ds.zero_stage": zero_stage}
    strategy = make_strategy(dotted.replace(SFTConfig(), given | schedule | {"adam.lr": lr, "min_lr_ratio": 0.2}))
    args = strategy.args
    strategy.setup_distributed()
    names = ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
    cfg = {"muon": vars(args.muon), "adam": vars(args.adam), "scheduler_steps": steps}
    engine, _, scheduler = strategy.prepare((Sum(), cfg | {name: getattr(args, name) for name in names}))
    assert scheduler is engine.lr_scheduler
    return strategy, engine


def moved(strategy: KitStrategy, engine: DeepSpeedEngine) -> float:
    """Make an update and return how far it moved the weights."""
    before = weight_of(engine)
    strategy.backward(engine(), engine, None)
    strategy.optimizer_step(None, engine, None)
    difference = before - weight_of(engine)
    assert difference.std() < 1e-8
    return float(difference.mean())


def weight_of(engine: DeepSpeedEngine) -> torch.Tensor:
    (weight,) = engine.module.parameters()
    full = weight.detach() if engine.zero_optimization_stage() == 0 else safe_get_full_fp32_param(weight)
    return full.clone()


RATES = table("integration/learning_rates", "rates")


@pytest.mark.parametrize("name", RATES)
def test_updates_learn_at_the_rates_worked_out_by_hand(name):
    run = made(steps=8, lr_scheduler=name, lr_warmup_ratio=0.5)
    rates = []
    for share in RATES[name]:
        rates.append(run[1].get_lr()[0])
        assert moved(*run) == pytest.approx(share * PEAK, rel=1e-4)
    assert rates == pytest.approx([share * PEAK for share in RATES[name]], rel=1e-4)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_resumed_run_goes_on_at_the_rate_of_the_next_update(zero_stage, after, tmp_path):
    schedule: dict[str, Any] = {"steps": 8, "zero_stage": zero_stage, "lr_warmup_ratio": 0.5}
    saver, engine = made(**schedule)
    for _ in range(after):
        moved(saver, engine)
    saver.save_ckpt(engine, str(tmp_path), f"global_step{after}")
    loader, loaded = made(**schedule)
    assert loader.load_ckpt(loaded, str(tmp_path))[0] is not None
    for share in RATES["cosine_with_min_lr"][after:]:
        assert loaded.get_lr() == pytest.approx([share * PEAK] * len(loaded.get_lr()), rel=1e-4)
        assert moved(loader, loaded) == pytest.approx(share * PEAK, rel=1e-4)
