"""Optimizer steps: Adam by PyTorch and by DeepSpeed, on the device and on the host; whole updates under ZeRO-2 and ZeRO-3."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_stages.record import Result, Save, Task
from gpu_stages.setting import Setting, gib
from gpu_stages.subject import GROUP, SAMPLES
from gpu_stages.updates import checkpointing_subject

from lmm_r1 import cpu

# In tensors of a layer's size, in single precision as ZeRO holds what it updates.
WEIGHTS, OF_TENSOR = 1_000_000_000, 11008 * 2048
LEARNING_RATE = 1e-6


def tasks(setting: Setting) -> list[Task]:
    found = [Task(name=f"adam/{name}", measure=partial(_stepped, setting, name)) for name in ADAMS]
    for name, stage, offload in (("zero_2", 2, False), ("zero_3", 3, False), ("zero_3_adam_offload", 3, True)):
        found.append(Task(name=name, measure=partial(_updated, setting, stage, offload)))
    return found


def _deepspeed(weights: list[torch.Tensor], *, name: str, lr: float) -> Any:
    return getattr(importlib.import_module("deepspeed.ops.adam"), name)(weights, lr=lr)


# By name: what makes it, and whether the weights are on the host.
ADAMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "torch_fused": (partial(torch.optim.AdamW, fused=True), False),
    "torch_foreach": (partial(torch.optim.AdamW, foreach=True), False),
    "deepspeed_fused": (partial(_deepspeed, name="FusedAdam"), False),
    "torch_on_host": (partial(torch.optim.AdamW, fused=True), True),
    "deepspeed_on_host": (partial(_deepspeed, name="DeepSpeedCPUAdam"), True),
}


def _stepped(setting: Setting, name: str, save: Save) -> Result:
    """Return the seconds of a step on a billion weights, and the bytes per second that it reads and writes."""
    make, on_host = ADAMS[name]
    if "deepspeed" in name and (missing := _missing("deepspeed")):
        return missing
    if "deepspeed" in name and not setting.device.is_cuda:
        return {"absent": "a GPU: without one it is not worth the minutes that its compilation takes"}
    place = torch.device("cpu") if on_host else setting.device.place
    of_tensor = setting.scaled(OF_TENSOR)
    weights = [torch.zeros(of_tensor, device=place) for _ in range(WEIGHTS // OF_TENSOR)]
    for weight in weights:
        weight.requires_grad_(True)
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = make(weights, lr=LEARNING_RATE)
    took = setting.device.median_seconds(optimizer.step, repeats=setting.repeats)
    count = sum(weight.numel() for weight in weights)
    # Weight and both moments are read and written, and the gradient is read.
    return {"weights": count, "seconds": round(took, 5), "gb_per_s": round(7 * 4 * count / took / 1e9, 1)}


def _updated(setting: Setting, stage: int, offload: bool, save: Save) -> Result:
    """Return the seconds of forward, backward and step of one group under ZeRO with one rank, and the peak memory."""
    if missing := _missing("deepspeed"):
        return missing
    _join_alone(setting)
    import deepspeed

    subject = checkpointing_subject(setting)
    adam, source = _adam(offload=offload)
    engine, *_ = deepspeed.initialize(
        model=subject.policy.model,
        model_parameters=list(subject.policy.model.parameters()),
        config=zero_config(stage=stage, offload=offload, adam=adam),
    )
    driven = replace(subject, policy=replace(subject.policy, run=engine))
    samples = setting.scaled(SAMPLES, least=2)
    batch = driven.batch(GROUP.scaled(setting.scale), samples=samples)
    device, spent = setting.device, {"backward": 0.0, "step": 0.0}

    def update() -> None:
        spent["backward"] = device.seconds(
            lambda: engine.backward(driven.loss(batch, layout="shared", logits="chunked"))
        )
        spent["step"] = device.seconds(engine.step)

    try:
        # The first makes the optimizer's state.
        device.seconds(update)
        peak = device.peak_bytes(update)
        seconds = device.median_seconds(update, repeats=setting.repeats)
    finally:
        engine.destroy()
    return {
        "adam": {**adam, "chosen_by": source},
        **driven.rates(batch, samples=samples, seconds=seconds, device=device),
        "forward_backward_s": round(spent["backward"], 4),
        "step_s": round(spent["step"], 4),
        "peak_gib": gib(peak),
    }


def zero_config(*, stage: int, offload: bool, adam: dict[str, bool]) -> Result:
    """Return DeepSpeed's settings for one rank as OpenRLHF makes them for a policy in bf16."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, **adam}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu" if offload else "none", "pin_memory": cpu.has_cuda()},
            **cpu.zero_settings(),
        },
    }


def _adam(*, offload: bool) -> tuple[dict[str, bool], str]:
    """Return what the training strategy would choose, and who chose: without OpenRLHF it cannot be asked."""
    if _missing("openrlhf"):
        fused = {} if offload or not cpu.has_cuda() else {"fused": True}
        return {"torch_adam": True, **fused}, "gpu_check, as the strategy could not be imported"
    from lmm_r1.host.strategy import torch_adam

    return torch_adam(offload=offload), "lmm_r1.host.strategy"


def _join_alone(setting: Setting) -> None:
    """Start a process group of this process alone, before DeepSpeed is imported."""
    if dist.is_initialized():
        return
    cpu.prepare_process()
    from lmm_r1.host import strategy

    strategy.prepare_training()
    import deepspeed

    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ.update(alone)
    deepspeed.init_distributed(dist_backend="nccl" if setting.device.is_cuda else "gloo")


def _missing(package: str) -> Result | None:
    """Return the result of what cannot run without a package; None where it is there."""
    return None if importlib.util.find_spec(package) is not None else {"absent": package}
