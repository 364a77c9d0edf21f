"""DeepSpeed in the process of the tests, which may set it up more than once."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from lmm_r1 import cpu
from lmm_r1.host.strategy import default_to_one_process

_engines: list[deepspeed.DeepSpeedEngine] = []


def destroy_engines() -> None:
    """Free what engines hold, a bucket of up to 2 GB each among it: a process with dozens of them cannot be forked."""
    while _engines:
        _engines.pop().destroy()


def start_anew(patch: pytest.MonkeyPatch) -> None:
    """Let a training in this process make groups of its own: DeepSpeed keeps those of the first one for good."""
    patch.setattr("deepspeed.comm.comm.cdb", None)
    patch.setattr("deepspeed.utils.groups._WORLD_GROUP", None)


@contextmanager
def one_process() -> Iterator[None]:
    """DeepSpeed with this process alone, on the CPU; what that changes around it is put back."""
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        changed = [(torch.cuda, name) for name in ("current_device", "set_device", "synchronize", "current_stream")]
        changed.append((importlib.import_module("openrlhf.utils.deepspeed.deepspeed"), "init_device_mesh"))
        changed.append((importlib.import_module("deepspeed.comm.torch"), "build_shm_op"))
        for owner, name in changed:
            patch.setattr(owner, name, getattr(owner, name))
        start_anew(patch)
        initialize = deepspeed.initialize

        def noted(*arguments: Any, **named: Any) -> Any:
            engine, *others = initialize(*arguments, **named)
            _engines.append(engine)
            return engine, *others

        patch.setattr(deepspeed, "initialize", noted)
        cpu.prepare_process()
        default_to_one_process()
        yield
        # Where vLLM ran in this process, its end was that of the group, too.
        if dist.is_initialized():
            destroy_engines()
            dist.destroy_process_group()
        _engines.clear()
    os.environ.clear()
    os.environ.update(environment)
