"""bitsandbytes' AdamW, whose moments take a byte each (https://arxiv.org/abs/2110.02861), as DeepSpeed's optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from lmm_r1 import cpu
from lmm_r1.errors import UserError

KINDS: dict[str, type[AdamW8bit | PagedAdamW8bit]] = {"adamw_8bit": AdamW8bit, "paged_adamw_8bit": PagedAdamW8bit}
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_MAKES_OPTIMIZER = "_configure_basic_optimizer"


@contextmanager
def eight_bit_adam(optim: str) -> Iterator[None]:
    """While it is entered, engines that are told to take AdamW get the one in 8 bits; for other optimizers nothing changes.

    ZeRO-1, 2 and 3 let it update the flat single-precision weights that a rank owns. Raises UserError for pages on CPUs.
    """
    if optim not in KINDS:
        yield
        return
    kind = KINDS[optim]
    if kind is PagedAdamW8bit and not cpu.has_cuda():
        raise UserError(f"--optim {optim}: pages are memory that CUDA moves, and there is none here; take adamw_8bit")
    if kind not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(kind)
    engine = engine_module.DeepSpeedEngine
    make = getattr(engine, _MAKES_OPTIMIZER)

    def configure(self: Any, model_parameters: Any) -> AdamW8bit | PagedAdamW8bit:
        settings = self.optimizer_params()
        return kind(model_parameters, **{name: settings[name] for name in _SETTINGS})

    setattr(engine, _MAKES_OPTIMIZER, configure)
    try:
        yield
    finally:
        setattr(engine, _MAKES_OPTIMIZER, make)
