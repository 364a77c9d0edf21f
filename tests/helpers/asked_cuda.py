"""A worker set-up hook that notes which GPUs a Ray worker may see whenever it asks CUDA."""

import os
from pathlib import Path
from typing import Any

NOTES = "TEST_ASKED_CUDA"


def prepare() -> None:
    """Set the worker up as a run does, with every question to CUDA written to the file of `NOTES`."""
    import torch

    for name, answer in (("is_available", False), ("device_count", 0), ("init", None), ("_lazy_init", None)):
        setattr(torch.cuda, name, _noting(answer))
    from lmm_r1 import cpu

    cpu.prepare_worker()


def _noting(answer: Any) -> Any:
    def asked() -> Any:
        with Path(os.environ[NOTES]).open("a", encoding="utf-8") as file:
            file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
        return answer

    return asked
