"""Which tokens of a packed sequence attend to which: segments behind one another, some of which share a prefix."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import torch

from lmm_r1.models.packed.varlen_kernel import Stretches

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens `start` to `end`; each attends to those before it in the segment, to itself and to the prefix."""

    start: int
    end: int
    prefix: int | None = None
    """Index of an earlier segment that all tokens of this one attend to; None for a segment by itself."""

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """The segments of one packed sequence of T tokens, in order and without gaps.

    `block_ids` (T,) numbers the runs of tokens with bidirectional attention among them, -1 for all other tokens;
    None where there are none. No run crosses the border of a segment.
    """

    segments: tuple[Segment, ...]
    block_ids: torch.Tensor | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

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
    def key_lengths(self) -> tuple[int, ...]:
        """How many keys each segment attends to, those of its prefix among them."""
        return tuple(self.prefix_length(segment) + segment.length for segment in self.segments)

    def prefix_length(self, segment: Segment) -> int:
        return 0 if segment.prefix is None else self.segments[segment.prefix].length

    def is_plain(self, index: int, *, window: int | None) -> bool:
        """Whether a segment without a prefix is causal and nothing else."""
        segment = self.segments[index]
        return segment.prefix is None and not self.has_block[index] and not self._is_cut(segment, window)

    @cached_property
    def runs(self) -> tuple[tuple[int, slice], ...]:
        """The index of each shared prefix, with the tokens of all segments behind it that stand behind one another."""
        runs = []
        for prefix, group in groupby(self.segments, key=lambda segment: segment.prefix):
            members = list(group)
            if prefix is not None:
                runs.append((prefix, slice(members[0].start, members[-1].end)))
        return tuple(runs)

    def cuts_prefix(self, *, window: int | None) -> bool:
        """Whether the window keeps a token from some of a prefix that it attends to without it."""
        return any(segment.prefix is not None and self._is_cut(segment, window) for segment in self.segments)

    def cuts(self, *, window: int | None) -> bool:
        """Whether the window keeps a token from any that it attends to without it."""
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

    def _is_cut(self, segment: Segment, window: int | None) -> bool:
        return window is not None and self.prefix_length(segment) + segment.length > window

    def _make_mask(
        self, segment: Segment, *, window: int | None, has_block: bool, device: torch.device
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
    """A prefix that stands among the keys of every segment behind it as well as among its own."""

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
            [
                own if segment.prefix is None else torch.cat([places[segment.prefix], own])
                for segment, own in zip(layout.segments, places, strict=True)
            ]
        )
        keys = torch.arange(len(tokens)).split(layout.key_lengths)
        own_keys = [key[layout.prefix_length(segment) :] for segment, key in zip(layout.segments, keys, strict=True)]
        copies: dict[int, list[torch.Tensor]] = {}
        for segment, key in zip(layout.segments, keys, strict=True):
            if segment.prefix is not None:
                seen = copies.setdefault(segment.prefix, [own_keys[segment.prefix]])
                seen.append(key[: layout.prefix_length(segment)])
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
