"""Kernels of GPUs for sequences of several lengths: PyTorch's, and flash-attn's if it is installed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretches:
    """Offsets of S consecutive sequences; a causal mask ends at the last key of each."""

    query_ends: torch.Tensor
    """Where the queries of each sequence end, from 0 on, (S + 1,), int32."""
    key_ends: torch.Tensor
    """Where its keys end, (S + 1,), int32."""
    longest_query: int
    longest_key: int


@dataclass(frozen=True, kw_only=True)
class VarlenKernel:
    """A kernel by its name."""

    name: str
    function: Callable[..., torch.Tensor]
    """Takes queries, keys, values, the four fields of stretches, and by name `causal`, `window_size` and `scale`."""

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
        ends = (stretches.query_ends, stretches.key_ends, stretches.longest_query, stretches.longest_key)
        # How many tokens before and after itself a token sees, -1 for all.
        sides = (-1 if window is None else window - 1, 0 if causal else -1)
        return self.function(queries, keys, values, *ends, causal=causal, window_size=sides, scale=scaling)


def kernel_for(query: torch.Tensor, value: torch.Tensor, *, dropout: float) -> VarlenKernel | None:
    """Return this process's kernel if it takes these heads (..., D): on a GPU, in half precision, without dropout."""
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % 8 == 0 and width <= _WIDEST and query.dtype in _HALF
    return varlen_kernel() if query.is_cuda and fits and not dropout else None


@cache
def varlen_kernel() -> VarlenKernel | None:
    """Return the kernel of this process's GPU, None if there is none for it; the choice is logged once."""
    kernel = None
    if torch.cuda.get_device_capability() >= (8, 0):
        # FlashAttention 3 reaches PyTorch's own function, and comes before flash-attn 2.
        kernel = _of_torch("FlashAttention 3") if _activate_flash_attention_3() else _flash_attn()
        kernel = kernel or _of_torch("FlashAttention 2")
    name = "no kernel for sequences of varying length" if kernel is None else kernel.name
    logger.info("attention over packed sequences and windows of images: %s", name)
    return kernel


def _flash_attn() -> VarlenKernel | None:
    """Return flash-attn's kernel if it is compiled; the stand-in in compat/ has none."""
    try:
        import flash_attn_2_cuda  # noqa: F401
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None

    def attend(*given: object, scale: float | None, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
        return flash_attn_varlen_func(*given, softmax_scale=scale, causal=causal, window_size=window_size)

    return VarlenKernel(name="flash-attn 2", function=attend)


def _of_torch(inner: str) -> VarlenKernel:
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        queries: torch.Tensor,
        keys: torch.Tensor,
        *given: Any,
        scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        grouped = queries.shape[1] != keys.shape[1]
        output = varlen_attn(queries, keys, *given, scale=scale, window_size=window_size, enable_gqa=grouped)
        assert isinstance(output, torch.Tensor), "nothing else was asked for"
        return output

    return VarlenKernel(name=f"PyTorch's varlen_attn ({inner})", function=attend)


def _activate_flash_attention_3() -> bool:
    """Let PyTorch's operators run the kernels of `flash_attn_interface`, which are for compute capability 9.

    PyTorch contains only their registration.
    """
    from torch.nn.attention import activate_flash_attention_impl

    if importlib.util.find_spec("flash_attn_interface") is None or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("flash_attn_interface is installed, but PyTorch cannot use its FlashAttention 3: %s", error)
        return False
    return True
