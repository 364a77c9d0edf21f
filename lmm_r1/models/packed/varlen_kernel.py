"""PyTorch's kernel for sequences of several lengths, and flash-attn's if it is installed."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretches:
    """Where S sequences stand that are behind one another; a causal mask ends at the last key of each."""

    query_ends: torch.Tensor
    """Where the queries of each sequence end, from 0 on, (S + 1,), int32."""
    key_ends: torch.Tensor
    """Where its keys end, (S + 1,), int32."""
    longest_query: int
    longest_key: int


@dataclass(frozen=True, kw_only=True)
class VarlenKernel:
    """A kernel, and what it takes by itself."""

    name: str
    function: Callable[..., torch.Tensor]
    """Takes queries, keys, values, stretches, and by name `causal`, `window` and `scaling`."""
    takes_groups: bool
    """Whether several query heads may share a head of keys."""
    takes_windows: bool

    def takes(self, query: torch.Tensor, value: torch.Tensor, *, window: int | None) -> bool:
        """Whether it takes heads of this width, (..., D), in this precision."""
        width = query.shape[-1]
        fits = width == value.shape[-1] and width % 8 == 0 and width <= _WIDEST
        return fits and query.dtype in _HALF and (window is None or self.takes_windows)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        stretches: Stretches,
        *,
        causal: bool,
        window: int | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Return the outputs (T, H, D) of queries (T, H, D) over keys and values (K, G, D).

        Args:
            window: how many tokens of its sequence a token sees, itself among them; None for all.
        """
        assert causal or window is None, "a window looks back"
        repeats = queries.shape[1] // keys.shape[1]
        if repeats > 1 and not self.takes_groups:
            # The gradient of an expanded tensor is summed in single precision.
            keys, values = (tensor.unsqueeze(2).expand(-1, -1, repeats, -1).flatten(1, 2) for tensor in (keys, values))
        return self.function(queries, keys, values, stretches, causal=causal, window=window, scaling=scaling)


@cache
def varlen_kernel() -> VarlenKernel | None:
    """Return the kernel of this process's GPU, None where there is none for it; asked once, and logged."""
    kernel = None
    if torch.cuda.get_device_capability() >= (8, 0):
        # FlashAttention 3 reaches PyTorch's own function, and comes before flash-attn 2.
        found = (_of_torch, _flash_attn) if _activated() else (_flash_attn, _of_torch)
        kernel = found[0]() or found[1]()
    name = "no kernel for sequences of varying length" if kernel is None else kernel.name
    logger.info("attention over packed sequences and windows of images: %s", name)
    return kernel


def _flash_attn() -> VarlenKernel | None:
    """Return flash-attn's kernel where it is compiled; the stand-in in compat/ has none."""
    try:
        import flash_attn_2_cuda  # noqa: F401
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None

    def attend(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        stretches: Stretches,
        *,
        causal: bool,
        window: int | None,
        scaling: float | None,
    ) -> torch.Tensor:
        return flash_attn_varlen_func(
            queries,
            keys,
            values,
            stretches.query_ends,
            stretches.key_ends,
            stretches.longest_query,
            stretches.longest_key,
            softmax_scale=scaling,
            causal=causal,
            window_size=_sides(causal=causal, window=window),
        )

    return VarlenKernel(name="flash-attn 2", function=attend, takes_groups=True, takes_windows=True)


def _of_torch() -> VarlenKernel | None:
    """Return PyTorch's kernel as the installed release has it; its signature has grown from release to release."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters.keys()
    windows, groups = "window_size" in names, "enable_gqa" in names
    if "scale" not in names or not (windows or "is_causal" in names):
        return None
    return VarlenKernel(
        name=f"PyTorch's varlen_attn ({_activated() or 'its FlashAttention 2'})",
        function=partial(_call_torch, varlen_attn, windows=windows, groups=groups),
        takes_groups=groups,
        takes_windows=windows,
    )


def _call_torch(
    varlen_attn: Callable[..., Any],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    stretches: Stretches,
    *,
    causal: bool,
    window: int | None,
    scaling: float | None,
    windows: bool,
    groups: bool,
) -> torch.Tensor:
    settings: dict[str, object] = {"scale": scaling}
    if windows:
        settings["window_size"] = _sides(causal=causal, window=window)
    else:
        settings["is_causal"] = causal
    if groups:
        settings["enable_gqa"] = queries.shape[1] != keys.shape[1]
    return varlen_attn(
        queries,
        keys,
        values,
        stretches.query_ends,
        stretches.key_ends,
        stretches.longest_query,
        stretches.longest_key,
        **settings,
    )


def _sides(*, causal: bool, window: int | None) -> tuple[int, int]:
    """Return how many tokens before and behind itself a token sees, -1 for all."""
    return (-1 if window is None else window - 1, 0 if causal else -1)


def _activated() -> str | None:
    """Return the FlashAttention that PyTorch's operators run instead of their own; 3 is activated where it is installed.

    Of PyTorch's FlashAttention 3 only the registration comes with it: the kernels are the package
    `flash_attn_interface`, for GPUs of compute capability 9.
    """
    try:
        from torch.nn.attention import (
            activate_flash_attention_impl,
            current_flash_attention_impl,
            list_flash_attention_impls,
        )
    except ImportError:
        return None
    chosen = current_flash_attention_impl()
    installed = importlib.util.find_spec("flash_attn_interface") is not None
    if chosen is not None or not installed or "FA3" not in list_flash_attention_impls():
        return chosen
    if torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("flash_attn_interface is installed, but PyTorch cannot use its FlashAttention 3: %s", error)
    return current_flash_attention_impl()
