"""Liger's fused kernels (https://arxiv.org/abs/2410.10989) for norms, gated feed-forward layers and rotary embeddings.

A module gets a kernel if it computes what the kernel computes, which a small input shows; its class's name does not
matter. Modules keep their parameters, their children and the names of both, so adapters, 4-bit layers and ZeRO-3 work
as before.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from subprocess import CalledProcessError
from types import FunctionType
from typing import Any, Literal

import torch
from torch.nn.functional import gelu, linear, silu

from lmm_r1 import cpu

logger = logging.getLogger(__name__)

# How often the product with the weight is rounded, by Liger's numbers for it.
TWICE, ONCE = 0, 1
# What is added to the weight, and the rounding.
_NORMS = ((0.0, TWICE), (1.0, ONCE), (0.0, ONCE))
_EPSILONS = ("variance_epsilon", "eps")
_WIDTH = 16

Activation = Callable[[torch.Tensor], torch.Tensor]
Forward = Callable[..., Any]
RotationKind = Literal["heads", "patches", "sections"]
Rotated = tuple[torch.Tensor, torch.Tensor]


def use_liger(model: torch.nn.Module) -> None:
    """Put Liger's kernels into a model, on GPUs where they run; elsewhere it stays as it is."""
    if not cpu.has_cuda():
        return
    failure = _failure(torch.device("cuda"))
    if failure is None:
        counts = fuse(model)
        logger.info(
            "Liger's kernels: %s", ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none fits"
        )
    else:
        logger.warning("Training is slower without Liger's kernels: %s", failure)


@cache
def _failure(device: torch.device) -> str | None:
    """Return why a pass over a few numbers cannot run; None if it runs. A package or a C compiler may be missing."""
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        gate, up = torch.ones(2, _WIDTH, device=device).requires_grad_()
        with torch.enable_grad():
            LigerSiLUMulFunction.apply(gate, up).sum().backward()
    except ModuleNotFoundError as error:
        return f"{error} (`pip install liger-kernel`)"
    except (ImportError, OSError, RuntimeError, CalledProcessError) as error:
        return str(error)
    return None


def fuse(model: torch.nn.Module) -> Counter[str]:
    """Put a kernel into each module that one fits, and return how many of each kind there are."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        for kind, find in (("norms", _norm), ("feed-forward layers", _gated), ("rotary embeddings", _rotating)):
            forward = find(module)
            if forward is not None:
                cls: Any = type(module)
                module.__class__ = _with_forward(cls, forward)
                counts[kind] += 1
                break
    return counts


@cache
def _with_forward(cls: type[torch.nn.Module], forward: Forward) -> type[torch.nn.Module]:
    """Return a class with another forward, and the name by which DeepSpeed and transformers know the first."""
    return type(
        cls.__name__, (cls,), {"forward": forward, "__qualname__": cls.__qualname__, "__module__": cls.__module__}
    )


def _norm(module: torch.nn.Module) -> Forward | None:
    """Return the kernel's forward for a root-mean-square norm with a weight; None for any other module."""
    epsilon = next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if epsilon is None or [*module._parameters] != ["weight"] or module._buffers or module._modules:
        return None
    weight = module._parameters["weight"]
    # ZeRO-3 leaves a part of it here.
    width = getattr(weight, "ds_shape", None if weight is None else weight.shape)
    if width is None or len(width) != 1:
        return None
    cls: Any = type(module)
    kind = _norm_kind(cls, epsilon, getattr(module, epsilon), tuple(width))
    return None if kind is None else _norm_forward(epsilon, *kind)


@cache
def _norm_kind(cls: type[torch.nn.Module], name: str, eps: float, shape: tuple[int, ...]) -> tuple[float, int] | None:
    """Return of a norm's class what is added to the weight, and where it rounds; None if it is no such norm."""
    generator = torch.Generator().manual_seed(0)
    # So small that epsilon counts.
    hidden = (eps**0.5 * torch.randn(4, *shape, generator=generator)).to(torch.bfloat16)
    weight = torch.randn(shape, generator=generator).to(torch.bfloat16)
    probe = torch.nn.Module.__new__(cls)
    torch.nn.Module.__init__(probe)
    probe.weight = torch.nn.Parameter(weight, requires_grad=False)
    setattr(probe, name, eps)
    try:
        found = cls.forward(probe, hidden)
    except (AttributeError, TypeError, RuntimeError):
        return None
    for offset, casting in _NORMS:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        once = (wide * (offset + weight.float())).to(hidden.dtype)
        if torch.equal(found, once if casting == ONCE else (offset + weight) * wide.to(hidden.dtype)):
            return offset, casting
    return None


@cache
def _norm_forward(epsilon: str, offset: float, casting: int) -> Forward:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        # Not in place: what reaches the norm's output may be the gradient of something else, too.
        return LigerRMSNormFunction.apply(hidden_states, self.weight, getattr(self, epsilon), offset, casting, False)

    return forward


def _gated(module: torch.nn.Module) -> Forward | None:
    """Return the kernel's forward for a feed-forward layer whose gate goes through SiLU or tanh's GELU; None for others."""
    children = set(module._modules)
    joined = "gate_up_proj" in children
    rest = children - ({"gate_up_proj"} if joined else {"gate_proj", "up_proj"}) - {"down_proj"}
    if len(children) != (3 if joined else 4) or len(rest) != 1 or module._parameters:
        return None
    (name,) = rest
    activation = _activation(module._modules[name])
    if activation is None or not _is_gated(module, activation, joined=joined):
        return None
    return _gated_forward(activation, joined=joined)


def _activation(module: Any) -> Activation | None:
    """Return the activation that a module computes if Liger has a kernel with it."""
    if not isinstance(module, torch.nn.Module) or any(True for _ in module.parameters()):
        return None
    values = torch.linspace(-6, 6, 101)
    found = module(values)
    return next(
        (known for known in (silu, _tanh_gelu) if torch.allclose(found, known(values), rtol=0, atol=1e-6)), None
    )


def _tanh_gelu(values: torch.Tensor) -> torch.Tensor:
    return gelu(values, approximate="tanh")


def _is_gated(module: torch.nn.Module, activation: Activation, *, joined: bool) -> bool:
    """Whether a module with these children projects, multiplies one half with the activated other, and projects back."""
    generator = torch.Generator().manual_seed(0)
    hidden, gate, up, down = (torch.randn(_WIDTH, _WIDTH, generator=generator) for _ in range(4))
    probe = copy.copy(module)
    # Its own, for the copy only.
    children = {"gate_up_proj": torch.cat([gate, up])} if joined else {"gate_proj": gate, "up_proj": up}
    layers = {name: _Product(weight) for name, weight in {**children, "down_proj": down}.items()}
    vars(probe)["_modules"] = {**module._modules, **layers}
    try:
        found = type(module).forward(probe, hidden)
    except (AttributeError, TypeError, RuntimeError):
        return False
    expected = linear(activation(linear(hidden, gate)) * linear(hidden, up), down)
    return isinstance(found, torch.Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=1e-4)


class _Product(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Buffer(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight)


@cache
def _gated_forward(activation: Activation, *, joined: bool) -> Forward | None:
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    multiply = (LigerSiLUMulFunction if activation is silu else LigerGELUMulFunction).apply

    def of_two(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(multiply(self.gate_proj(hidden_states), self.up_proj(hidden_states)))

    def of_one(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        both = self.gate_up_proj(hidden_states)
        # The gradient of an input of three dimensions has two in 0.8.5, which PyTorch refuses.
        products = LigerFusedGateUpSiLUMulFunction.apply(both.flatten(0, -2), True)
        return self.down_proj(products.view(*both.shape[:-1], -1))

    if joined:
        return of_one if activation is silu else None
    return of_two


def _rotating(module: torch.nn.Module) -> Forward | None:
    """Return an attention layer's own forward with the kernel in the place of its rotation of queries and keys."""
    return _rotating_forward(type(module).forward)


@cache
def _rotating_forward(forward: Forward) -> Forward | None:
    """Return a copy of a forward that calls the kernel for rotations; None if it calls no function that it fits.

    The function itself stays, for whoever else calls it.
    """
    if not isinstance(forward, FunctionType):
        return None
    called = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    kinds = {name: _kind_of_rotation(function) for name, function in called.items()}
    kernels = {name: _rotation(kind) for name, kind in kinds.items() if kind is not None}
    if not kernels:
        return None
    copied: Any = FunctionType(
        forward.__code__, forward.__globals__ | kernels, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _kind_of_rotation(function: Any) -> RotationKind | None:
    """Return what a function rotates as the kernel does: halves of heads, by given cosines and sines; None if nothing."""
    if not inspect.isfunction(function) or [*inspect.signature(function).parameters][:4] != ["q", "k", "cos", "sin"]:
        return None
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2))
    # Of three axes; equal in both halves.
    cos, sin = (torch.randn(3, 1, 5, 4, generator=generator).repeat(1, 1, 1, 2) for _ in range(2))
    parts = [query[0].transpose(0, 1), key[0].transpose(0, 1)]
    calls: dict[RotationKind, tuple[Any, ...]] = {
        "heads": (query, key, cos[0], sin[0]),
        "patches": (*parts, cos[0, 0], sin[0, 0]),
        "sections": (query, key, cos, sin, [1, 2, 1]),
    }
    for kind, given in calls.items():
        try:
            found = function(*given)
        except (AttributeError, IndexError, RuntimeError, TypeError):
            continue
        # Each place of a half belongs to one axis.
        axes = (0, 1, 1, 2) * 2 if kind == "sections" else (0,) * 8
        own_cos, own_sin = (
            torch.stack([table[axis, :, None, :, place] for place, axis in enumerate(axes)], -1)
            for table in (cos, sin)
        )
        expected = [heads * own_cos + _turned(heads) * own_sin for heads in (query, key)]
        if kind == "patches":
            expected = [heads[0].transpose(0, 1) for heads in expected]
        if all(map(_agree, found, expected)):
            return kind
    return None


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=1e-5)


def _turned(heads: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


@cache
def _rotation(kind: RotationKind) -> Forward:
    """Return the kernel for queries (B, H, T, D) with angles (B, T, D), or of three axes; or for patches (T, H, D)."""
    from liger_kernel.ops.rope import LigerRopeFunction

    from lmm_r1.lmm_kits.features import rotate_by_sections

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
        return LigerRopeFunction.apply(q, k, cos, sin)

    def rotate_sections(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mrope_section: list[int]
    ) -> Rotated:
        return rotate_by_sections(q, k, cos, sin, mrope_section)

    def rotate_patches(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
        q, k = LigerRopeFunction.apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        return q[0].transpose(0, 1), k[0].transpose(0, 1)

    kernels: dict[RotationKind, Forward] = {"heads": rotate, "patches": rotate_patches, "sections": rotate_sections}
    return kernels[kind]
