"""Which tokens of a packed sequence attend to which (segments, possibly the nodes of trees), and GPU kernels for that.

The kernels take sequences of several lengths: PyTorch's, and flash-attn's if it is installed.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
class PackedSegment:
    """Tokens `start` to `end`; each attends to those before it in the segment, to itself and to all of the prefix."""

    start: int
    end: int
    prefix: int | None = None
    """Index of an earlier segment, which with its own prefix is that of this one; None for a segment by itself."""

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """The segments of one packed sequence of T tokens, in order and without gaps; trees stand in pre-order.

    `block_ids` (T,) numbers the runs of tokens with bidirectional attention among them, -1 for all other tokens;
    None where there are none. No run crosses the border of a segment.
    """

    segments: tuple[PackedSegment, ...]
    block_ids: torch.Tensor | None = None
    blocks_within_window: bool = False
    """Whether only layers with a sliding window have these runs."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        last: tuple[int, ...] = ()
        for index, segment in enumerate(self.segments):
            assert segment.prefix is None or segment.prefix in last, "segments of a tree stand behind one another"
            last = (*self.ancestors[index], index)

    @property
    def length(self) -> int:
        return self.segments[-1].end

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(segment.length for segment in self.segments)

    @cached_property
    def has_block(self) -> tuple[bool, ...]:
        """Whether each segment holds a run with bidirectional attention."""
        if self.block_ids is None:
            return (False,) * len(self.segments)
        return tuple(bool((part >= 0).any()) for part in self.block_ids.split(self.lengths))

    @cached_property
    def ancestors(self) -> tuple[tuple[int, ...], ...]:
        """Of each segment the indices of those that its prefix is made of, from its first token on."""
        found: list[tuple[int, ...]] = []
        for segment in self.segments:
            found.append(() if segment.prefix is None else (*found[segment.prefix], segment.prefix))
        return tuple(found)

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """How many keys each segment attends to, those of its prefix among them."""
        lengths: list[int] = []
        for segment in self.segments:
            lengths.append(segment.length + (0 if segment.prefix is None else lengths[segment.prefix]))
        return tuple(lengths)

    @cached_property
    def tree_ends(self) -> tuple[int, ...]:
        """Where the last of the segments ends that have this one in their prefix; where it ends itself if none has."""
        ends = [segment.end for segment in self.segments]
        for segment, prefix in zip(self.segments, self.ancestors, strict=True):
            for index in prefix:
                ends[index] = segment.end
        return tuple(ends)

    def seen_with(self, *, window: int | None) -> PackedLayout:
        """Return the layout for layers with this window."""
        if window is not None or not self.blocks_within_window or self.block_ids is None:
            return self
        return self.once("causal", lambda: PackedLayout(segments=self.segments))

    def prefix_length(self, segment: PackedSegment) -> int:
        return 0 if segment.prefix is None else self.key_lengths[segment.prefix]

    def is_plain(self, index: int, *, window: int | None) -> bool:
        """Whether a segment without a prefix is causal and nothing else."""
        segment = self.segments[index]
        return segment.prefix is None and not self.has_block[index] and not self._is_cut(segment, window)

    def cuts(self, *, window: int | None) -> bool:
        """Whether the window hides any token that another one attends to without it."""
        return any(self._is_cut(segment, window) for segment in self.segments)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returns, made once for all layers under this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def mask(self, index: int, *, window: int | None, device: torch.device) -> torch.Tensor:
        """Return which keys each token of a segment attends to, (L, P + L): those of its prefix first, then its own.

        Args:
            window: how many tokens of its own sequence a token sees, itself among them; None for all.
        """
        segment = self.segments[index]
        window = window if self._is_cut(segment, window) else None
        blocks = index if self.has_block[index] else None
        key = ("mask", segment.length, self.prefix_length(segment), window, blocks, device)
        return self.once(
            key, lambda: self._make_mask(segment, window=window, has_block=blocks is not None, device=device)
        )

    def varlen(self, *, device: torch.device) -> VarlenLayout:
        """Return the layout as varlen kernels take it."""
        return self.once(("varlen", device), lambda: VarlenLayout.of(self, device=device))

    def _is_cut(self, segment: PackedSegment, window: int | None) -> bool:
        return window is not None and self.prefix_length(segment) + segment.length > window

    def _make_mask(
        self, segment: PackedSegment, *, window: int | None, has_block: bool, device: torch.device
    ) -> torch.Tensor:
        offset = self.prefix_length(segment)
        keys = torch.arange(offset + segment.length, device=device)
        queries = keys[offset:, None]
        mask = keys <= queries
        if has_block:
            assert self.block_ids is not None, "a segment holds blocks"
            own = self.block_ids[segment.start : segment.end].to(device)
            mask[:, offset:] |= (own[:, None] == own) & (own >= 0)
        if window is not None:
            mask &= queries - keys < window
        return mask


@dataclass(frozen=True, kw_only=True, eq=False)
class RepeatedPrefix:
    """A segment whose keys are repeated for each segment that has it in its prefix."""

    start: int
    """Where it stands in the packed sequence."""
    copies: torch.Tensor
    """The places of each copy of its P tokens among all segments' keys, its own first, (copies, P)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VarlenLayout(Stretches):
    """A packed sequence of T tokens as varlen kernels take it, and its K keys, prefixes repeated."""

    key_index: torch.Tensor
    """The token of each of the K keys, (K,)."""
    own_keys: torch.Tensor
    """Which of the K keys is each token's own, (T,)."""
    prefixes: tuple[RepeatedPrefix, ...]
    """Those with segments behind them; none where every token has one key."""

    @classmethod
    def of(cls, layout: PackedLayout, *, device: torch.device) -> VarlenLayout:
        places = [torch.arange(segment.start, segment.end) for segment in layout.segments]
        tokens = torch.cat(
            [places[part] for index, prefix in enumerate(layout.ancestors) for part in (*prefix, index)]
        )
        keys = torch.arange(len(tokens)).split(layout.key_lengths)
        own_keys = [key[layout.prefix_length(segment) :] for segment, key in zip(layout.segments, keys, strict=True)]
        copies: dict[int, list[torch.Tensor]] = {}
        for prefix, key in zip(layout.ancestors, keys, strict=True):
            for part in prefix:
                seen = copies.setdefault(part, [own_keys[part]])
                seen.append(key[layout.key_lengths[part] - layout.lengths[part] : layout.key_lengths[part]])
        return cls(
            query_ends=_ends(layout.lengths, device=device),
            key_ends=_ends(layout.key_lengths, device=device),
            key_index=tokens.to(device),
            own_keys=torch.cat(own_keys).to(device),
            prefixes=tuple(
                RepeatedPrefix(start=layout.segments[prefix].start, copies=torch.stack(seen).to(device))
                for prefix, seen in copies.items()
            ),
            longest_query=max(layout.lengths),
            longest_key=max(layout.key_lengths),
        )


def _ends(lengths: Sequence[int], *, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def repeat_prefixes(tensor: torch.Tensor, varlen: VarlenLayout, *, dim: int) -> torch.Tensor:
    """Return keys or values with the T tokens along `dim` in the order of all segments' keys, prefixes repeated.

    A prefix's gradient is the sum of those of its copies: in half precision it would be rounded with every response.
    """
    return _RepeatPrefixes.apply(tensor, varlen, dim) if varlen.prefixes else tensor


class _RepeatPrefixes(torch.autograd.Function):
    """`index_select`, whose gradients are summed in single precision, in one order, and rounded once."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, varlen: VarlenLayout, dim: int) -> torch.Tensor:
        ctx.varlen, ctx.dim = varlen, dim
        return tensor.index_select(dim, varlen.key_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dim = ctx.dim
        total = gradient.index_select(dim, ctx.varlen.own_keys)
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        for prefix in ctx.varlen.prefixes:
            copies = gradient.index_select(dim, prefix.copies.flatten()).unflatten(dim, prefix.copies.shape)
            total.narrow(dim, prefix.start, prefix.copies.shape[1]).copy_(copies.sum(dim, dtype=dtype))
        return total, None, None


_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256


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
