"""Running a model in double precision throughout, to tell rounding from an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LOWER = (torch.float32, torch.bfloat16, torch.float16)


class DoublePrecision(TorchDispatchMode):
    """While it is entered, whatever asks for a lower floating-point precision gets fp64.

    Models of transformers cast norms, softmax and rotary angles to fp32 even where their weights are fp64. The model
    must be loaded before, and cast with `model.double()`, buffers included.
    """

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _LOWER:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
