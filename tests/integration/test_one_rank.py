"""ZeRO-2 on one rank does what mixed precision needs and no more, with the updates and checkpoints of DeepSpeed's own way."""

from functools import partial
from typing import Any

import pytest
import torch
from deepspeed import DeepSpeedEngine
from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states, reload_deepspeed_states

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.host import strategy as strategy_module
from lmm_r1.host.models import whole_state_dict
from lmm_r1.host.optimizer import check_finite
from lmm_r1.host.strategy import KitStrategy, make_strategy
from lmm_r1.models.loading import DTYPES

pytestmark = pytest.mark.usefixtures("one_process")

PASSES, UPDATES = 2, 3
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
# Above the norm of some updates' gradients, and below that of others.
MAX_NORM = 2.0


class Model(torch.nn.Module):
    """A weight that is used twice, small ones without decay, one that gets no gradient, and a frozen one."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, size)
        self.norm = torch.nn.LayerNorm(size)
        self.inner = torch.nn.Linear(size, size)
        self.unused = torch.nn.Linear(5, 3, bias=False)
        self.frozen = torch.nn.Linear(size, size).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.inner(self.norm(self.embed(ids))))
        return hidden @ self.embed.weight.T


@pytest.fixture
def made(monkeypatch) -> Any:
    """A function that makes a strategy and an engine, of which `bare` ones add gradients up as DeepSpeed does."""

    def make(dtype: str, *, bare: bool = False, **settings: Any) -> tuple[KitStrategy, DeepSpeedEngine]:
        given = {"train.batch_size": PASSES, "train.micro_batch_size": 1, "max_norm": MAX_NORM} | settings
        given |= {"ds.param_dtype": dtype, **{f"adam.{name}": value for name, value in ADAM.items()}}
        strategy = make_strategy(dotted.replace(SFTConfig(), given))
        args = strategy.args
        strategy.setup_distributed()
        cfg = {"optim": args.optim, "muon": vars(args.muon), "adam": vars(args.adam), "max_norm": MAX_NORM}
        schedule = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "scheduler_steps": 10}
        with monkeypatch.context() as patch:
            if bare:
                patch.setattr(strategy_module, "add_up_on_one_rank", lambda optimizer: None)
            return strategy, strategy.prepare((Model().to(DTYPES[dtype]), cfg | schedule))[0]

    return make


def one_pass(strategy: KitStrategy, engine: DeepSpeedEngine, number: int) -> None:
    ids = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(number))
    # Losses, and so the norms of their gradients, of several sizes.
    loss = torch.nn.functional.cross_entropy(engine(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    strategy.backward(loss * (1 + number % 3) / PASSES, engine, None)


def update(strategy: KitStrategy, engine: DeepSpeedEngine, number: int) -> float:
    """Make an update and return the norm of its gradients."""
    for place in range(PASSES):
        engine.set_gradient_accumulation_boundary(place == PASSES - 1)
        one_pass(strategy, engine, number * PASSES + place)
    strategy.optimizer_step(None, engine, None)
    return float(strategy.get_grad_norm(engine))


def states(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return masters and moments by group, without what fills them up."""
    optimizer: Any = engine.optimizer
    found = {}
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        length = master.numel() - optimizer.groups_padding[group]
        for name, value in {"master": master, **optimizer.optimizer.state[master]}.items():
            if value.dim():
                found[f"{group} {name}"] = value.detach()[:length].clone()
    return found


def assert_same(one: DeepSpeedEngine, other: DeepSpeedEngine, *, rounding: float) -> None:
    theirs = states(other)
    assert states(one).keys() == theirs.keys()
    for name, value in states(one).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-8, msg=name)
    weights = dict(other.module.named_parameters())
    for name, weight in one.module.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=rounding, atol=1e-8, msg=name)


ROUNDING = {"fp32": 1e-6, "bf16": 2**-7}


@pytest.mark.parametrize("accumulation", ["fp32", "as the weights"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_updates_are_those_of_deepspeed(made, dtype, accumulation):
    settings = {} if accumulation == "fp32" else {"ds.grad_accum_dtype": dtype}
    (ours, engine), (theirs, bare) = made(dtype, **settings), made(dtype, bare=True, **settings)
    begin = states(engine)
    norms = [[update(*run, number) for number in range(UPDATES)] for run in ((ours, engine), (theirs, bare))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert min(norms[0]) < MAX_NORM < max(norms[0])
    assert (states(engine)["0 master"] - begin["0 master"]).abs().max() > 0.01
    assert_same(engine, bare, rounding=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("saved_bare", [False, True])
def test_checkpoints_are_those_of_deepspeed(made, tmp_path, dtype, saved_bare):
    saver, saved = made(dtype, bare=saved_bare)
    update(saver, saved, 0)
    saver.save_ckpt(saved, str(tmp_path), "global_step1")
    loader, loaded = made(dtype, bare=not saved_bare)
    update(loader, loaded, 5)
    assert loader.load_ckpt(loaded, str(tmp_path))[0] is not None
    assert_same(loaded, saved, rounding=0)
    for run in ((saver, saved), (loader, loaded)):
        update(*run, 1)
    assert_same(loaded, saved, rounding=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_of_gradients_only_their_sums_are_kept_and_of_weights_in_fp32_no_copy(made, dtype):
    strategy, engine = made(dtype)
    optimizer, held = engine.optimizer, []
    numbers = sum(master.numel() for master in optimizer.single_partition_of_fp32_groups)
    step = optimizer.optimizer.step
    optimizer.optimizer.step = (
        lambda: held.extend(
            master.grad.data_ptr() for group in optimizer.optimizer.param_groups for master in group["params"]
        )
        or step()
    )
    engine.set_gradient_accumulation_boundary(False)
    one_pass(strategy, engine, 0)
    assert all(weight.grad is None for weight in engine.module.parameters())
    assert not optimizer.averaged_gradients
    assert not any(bucket.buffer for bucket in optimizer.ipg_buckets.values())
    engine.set_gradient_accumulation_boundary(True)
    one_pass(strategy, engine, 1)
    sums = [gradients.flat_partition for gradients in optimizer.averaged_gradients.values()]
    assert sum(part.numel() for part in sums) == numbers
    pointers = [part.data_ptr() for part in sums]
    strategy.optimizer_step(None, engine, None)
    assert held == pointers, "the optimizer takes the sums themselves"
    assert set(optimizer.averaged_gradients.values()) == {None}
    for master, weights in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat, strict=True):
        assert (master.data_ptr() == weights.data_ptr()) is (dtype == "fp32")
    address = engine.module.inner.weight.data_ptr()
    assert any(flat.data_ptr() <= address < flat.data_ptr() + flat.nbytes for flat in optimizer.bit16_groups_flat)


def test_gradients_that_are_not_finite_change_nothing(made):
    strategy, engine = made("bf16")
    update(strategy, engine, 0)
    before = states(engine)
    one_pass(strategy, engine, 1)
    engine.optimizer.averaged_gradients[0][0][0] = float("nan")
    with pytest.raises(Exception, match="gradients are not finite"):
        check_finite(engine, [torch.zeros(())], name="model")
    # DeepSpeed's own step leaves them out as well.
    engine.step()
    assert engine.skipped_steps == 1
    assert_unchanged = partial(torch.testing.assert_close, rtol=0, atol=0)
    for name, value in states(engine).items():
        assert_unchanged(value, before[name])


def weights_after(run: tuple[KitStrategy, DeepSpeedEngine], *, sleeps: bool) -> dict[str, torch.Tensor]:
    """Return the weights after some updates, between which the optimizer's states go to host memory and back."""
    for number in range(UPDATES):
        if sleeps:
            offload_deepspeed_states(run[1])
            reload_deepspeed_states(run[1])
        update(*run, number)
    return {name: weight.clone() for name, weight in whole_state_dict(run[1]).items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "flags"),
    [("fp32", {}), ("bf16", {}), ("bf16", {"optim": "adamw_8bit"}), ("bf16", {"ds.adam_offload": True})],
)
def test_updates_after_sleep_are_those_without_it(made, monkeypatch, dtype, flags, stage):
    # As on GPUs.
    monkeypatch.setattr(strategy_module, "torch_adam", lambda *, offload: {"torch_adam": True, "fused": not offload})
    # In 8 bits are tensors of more than 4,096 numbers.
    monkeypatch.setattr(Model.__init__, "__defaults__", (96,))
    runs = [made(dtype, **{"ds.zero_stage": stage}, **flags) for _ in range(3)]
    asleep, awake = (weights_after(run, sleeps=sleeps) for run, sleeps in zip(runs, (True, False), strict=False))
    torch.testing.assert_close(asleep, awake, rtol=0, atol=0)
    assert (awake["inner.weight"] != whole_state_dict(runs[2][1])["inner.weight"]).any()
