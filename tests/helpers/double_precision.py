"""Models of transformers in double precision, in which only an error remains of what rounding would hide."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

_LOWER = (torch.float32, torch.bfloat16, torch.float16)


def in_double(model: PreTrainedModel) -> None:
    """Cast a model to double precision, and let it compute its experts such that they take that: one after the other."""
    model.set_experts_implementation("eager")
    model.double()


class DoublePrecision(TorchDispatchMode):
    """While it is entered, whatever asks for a lower floating-point precision gets fp64.

    Models of transformers cast norms, softmax and rotary angles to fp32 even if their weights are fp64. The model
    must be loaded before, and cast with `in_double`, buffers included.
    """

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _LOWER:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
