"""The bytes of all tensors that are alive while code runs, with real tensors or with tensors that have no memory.

Tensors without memory are torch's fake ones: kernels are not run for them, and everything else is, so that a forward and
a backward pass make, keep and give back what they would. Ids, masks, grids and positions stay real: models read them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_INDEXED = (torch.ops.aten.index.Tensor,)
_DEVICE = torch.ops.prim.device.default
_GROUPED = torch.ops.aten._grouped_mm.default


class Unpredictable(Exception):
    """What is to be computed cannot be run on tensors without memory: it depends on their values, for instance."""


class LiveMemory(TorchDispatchMode):
    """While it is entered, counts the bytes of the tensors made within, and the most that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        # Storages by their address, each with its size, until it is given back.
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hold(self, size: int) -> None:
        """Count bytes beside those of tensors, or stop counting them where they are negative."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            # Asked for many times per operator, and makes nothing.
            return func(*args, **kwargs)
        try:
            result = _run(func, _without_masks(func, args), kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Unpredictable(f"{func} depends on the values of its tensors") from error
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if unknown := [leaf for leaf in made if _address(leaf) not in self._alive]:
            # Weights and what else was there before are not counted.
            given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            for leaf in unknown:
                if _address(leaf) not in given:
                    self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive or not size:
            return

        def gone(_: object) -> None:
            del self._alive[address]
            self.live -= size

        self._alive[address] = weakref.ref(storage, gone)
        self.hold(size)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator gives. Of experts' products without memory torch 2.13 knows the shape in bf16 alone."""
    if func is not _GROUPED or not isinstance(args[0], FakeTensor):
        return func(*args, **kwargs)
    left, right, *others = args
    return func(left.to(torch.bfloat16), right.to(torch.bfloat16), *others, **kwargs).to(left.dtype)


def _without_masks(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return an operator's arguments with real masks as indices: as many, which the result's shape depends on alone."""
    if func not in _INDEXED or not isinstance(args[0], FakeTensor):
        return args
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            indices += [torch.zeros(int(index.sum()), dtype=torch.long)] * index.dim()
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def take_memory(module: torch.nn.Module, *, zeros: bool = False) -> None:
    """Put tensors without memory in the place of a module's weights, whatever device they are on; buffers stay.

    Args:
        zeros: put real zeros there.
    """
    mode: AbstractContextManager[Any] = nullcontext() if zeros else _FakeTensorMode(allow_non_fake_inputs=True)
    # Two names of one weight stay so.
    replaced: dict[int, torch.nn.Parameter] = {}
    for owner in module.modules():
        for name, weight in owner._parameters.items():
            if weight is None:
                continue
            if id(weight) not in replaced:
                with mode:
                    empty = torch.zeros(weight.shape, dtype=weight.dtype, device="cpu")
                replaced[id(weight)] = torch.nn.Parameter(empty, requires_grad=weight.requires_grad)
            owner._parameters[name] = replaced[id(weight)]
    # Addresses of tensors without memory are only compared, as real ones would be.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
