"""Learning rates per parameter group, and what DeepSpeed is told of batches."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.errors import UserError
from lmm_r1.generation.ray_engines import ENGINE_DTYPES
from lmm_r1.host import strategy
from lmm_r1.host.strategy import make_strategy, split_groups
from lmm_r1.supervised import start


def test_members_get_groups_of_their_own_at_their_rate_and_keep_the_rest_of_their_settings():
    decayed, vision, bias = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    groups = [{"params": [decayed, vision], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    assert split_groups(groups, members={id(vision)}, lr=5e-4) == [
        {"params": [decayed], "weight_decay": 0.1},
        {"params": [vision], "weight_decay": 0.1, "lr": 5e-4},
        {"params": [bias], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("config_class", [PPOConfig, SFTConfig])
def test_deepspeed_knows_of_no_number_of_passes(config_class):
    config = dotted.replace(config_class(), {"train.batch_size": 12, "train.micro_batch_size": 8})
    made = make_strategy(config)
    trained, held = made.get_ds_train_config(), made.get_ds_eval_config()
    assert (trained["train_micro_batch_size_per_gpu"], trained["gradient_accumulation_steps"]) == (1, 1)
    # On its number of processes, whatever that is, DeepSpeed finds a whole number of passes.
    assert (held["train_micro_batch_size_per_gpu"], held["train_batch_size"]) == (1, 12)


def test_with_fp16_deepspeed_scales_the_loss_and_the_engine_computes_in_it_too():
    config = dotted.replace(PPOConfig(), {"ds.param_dtype": "fp16", "ds.zero_stage": 3})
    trained = make_strategy(config).get_ds_train_config()
    assert trained["fp16"]["enabled"]
    assert not trained["bf16"]["enabled"]
    # Without a scale of its own it is a dynamic one.
    assert "loss_scale" not in trained["fp16"]
    assert trained["data_types"]["grad_accum_dtype"] == "fp32"
    assert ENGINE_DTYPES["fp16"] == "float16"


@pytest.mark.parametrize(("has_cuda", "has_instructions"), [(True, False), (False, True), (False, False)])
def test_fp16_is_refused_where_this_machine_cannot_train_in_it(monkeypatch, has_cuda, has_instructions):
    monkeypatch.setattr(cpu, "has_cuda", lambda: has_cuda)
    monkeypatch.setattr(strategy.get_accelerator(), "is_fp16_supported", lambda: has_instructions, raising=False)
    for other in ("bf16", "fp32", None):
        strategy.check_fp16(other)
    if has_cuda or has_instructions:
        strategy.check_fp16("fp16")
        return
    with pytest.raises(UserError, match="^--ds.param_dtype fp16: this machine has no GPU, and its processor no fp16"):
        strategy.check_fp16("fp16")


ADAM = {"type": "AdamW", "params": {"lr": 1e-6}}
MUON = {"type": "Muon", "params": {"lr": 1e-6}}
CANNOT = ValueError("invalid literal for int() with base 10: '0a'")


@pytest.mark.parametrize("optimizer", [ADAM, MUON], ids=["AdamW", "Muon"])
@pytest.mark.parametrize(
    ("has_cuda", "reason", "offload", "added"),
    [
        (False, None, False, {"torch_adam": True}),
        (False, None, True, {"torch_adam": True}),
        (True, None, False, {"torch_adam": True, "fused": True}),
        (True, None, True, {}),
        (True, CANNOT, False, {"torch_adam": True, "fused": True}),
        (True, CANNOT, True, {"torch_adam": True}),
    ],
)
def test_adam_is_pytorchs_but_for_a_built_one_on_the_cpu(
    monkeypatch, caplog, optimizer, has_cuda, reason, offload, added
):
    config = dotted.replace(SFTConfig(), {"train.batch_size": 1, "train.micro_batch_size": 1})
    config = dotted.replace(config, {"ds.adam_offload": offload})
    monkeypatch.setattr(cpu, "has_cuda", lambda: has_cuda)
    asked = []

    def load(verbose: bool) -> None:
        asked.append(True)
        if reason is not None:
            raise reason

    monkeypatch.setattr(strategy, "CPUAdamBuilder", lambda: SimpleNamespace(load=load))
    monkeypatch.setattr(strategy.dist, "get_rank", lambda: 0)
    trained = make_strategy(config).get_ds_train_config(optimizer)
    assert trained["optimizer"] == {"type": optimizer["type"], "params": {"lr": 1e-6, **added}}
    assert optimizer["params"] == {"lr": 1e-6}
    assert asked == ([True] if has_cuda and offload else [])
    said = [record.getMessage() for record in caplog.records if record.name == strategy.__name__]
    slower = f"--ds.adam_offload: DeepSpeed's Adam for CPUs cannot be built here (ValueError: {CANNOT}); PyTorch's AdamW is used, "
    assert said == ([f"{slower}which is slower"] if reason and offload else [])


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run's strategy sets up a real group of one process, and nothing else."""

    def set_up() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    monkeypatch.setattr(start, "make_strategy", lambda args: SimpleNamespace(setup_distributed=set_up))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("joining")
def test_a_supervised_run_leaves_its_group_also_where_it_fails():
    with start._joined(SFTConfig()):
        assert dist.is_initialized()
    assert not dist.is_initialized()

    def fail(error: BaseException) -> None:
        with start._joined(SFTConfig()):
            assert dist.is_initialized()
            raise error

    for error in (UserError("a row"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
        assert not dist.is_initialized()


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize(
    ("failed", "backend", "processes", "aborts"),
    [(True, "nccl", 2, 1), (True, "nccl", 1, 0), (True, "gloo", 2, 0), (False, "nccl", 2, 0)],
)
def test_after_a_failure_nccl_waits_for_no_other_process(failed, backend, processes, aborts, monkeypatch):
    aborted: list[None] = []
    with start._joined(SFTConfig()), monkeypatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: backend)
        patch.setattr(dist, "get_world_size", lambda: processes)
        patch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append(None))
        strategy.leave_group(failed=failed)
        assert dist.is_initialized() == bool(aborts), "aborting is all that is done then"
    assert len(aborted) == aborts
