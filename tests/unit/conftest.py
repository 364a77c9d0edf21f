"""What tests of training code need around them."""

from collections.abc import Iterator

import pytest

from lmm_r1 import cpu


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, on the CPU."""
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("current_device", "set_device", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    cpu.prepare_worker()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
