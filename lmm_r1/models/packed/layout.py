"""Which tokens of a packed sequence attend to which: segments behind one another, some of which share a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch


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
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict, repr=False)
    _varlen: dict[tuple, VarlenLayout] = field(default_factory=dict, repr=False)

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

    def mask(self, index: int, *, window: int | None, device: torch.device) -> torch.Tensor:
        """Return which keys each token of a segment attends to, (L, P + L): those of its prefix first, then its own.

        Args:
            window: how many tokens of its own sequence a token sees, itself among them; None for all.
        """
        segment = self.segments[index]
        window = window if self._is_cut(segment, window) else None
        blocks = index if self.has_block[index] else None
        key = (segment.length, self.prefix_length(segment), window, blocks, device)
        if key not in self._masks:
            self._masks[key] = self._make_mask(segment, window=window, has_block=blocks is not None, device=device)
        return self._masks[key]

    def varlen(self, *, device: torch.device) -> VarlenLayout:
        """Return the layout as varlen kernels take it."""
        key = (device,)
        if key not in self._varlen:
            self._varlen[key] = VarlenLayout.of(self, device=device)
        return self._varlen[key]

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


@dataclass(frozen=True, kw_only=True)
class VarlenLayout:
    """A packed sequence as varlen kernels take it; the causal mask ends at the last key of each segment."""

    query_ends: torch.Tensor
    """Where the queries of each segment end, from 0 on, (S + 1,), int32."""
    key_ends: torch.Tensor
    """Where its keys end, (S + 1,), int32."""
    key_index: torch.Tensor | None
    """The T tokens in the order of all segments' keys, prefixes repeated; None where no segment has a prefix."""
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, layout: PackedLayout, *, device: torch.device) -> VarlenLayout:
        places = [torch.arange(segment.start, segment.end) for segment in layout.segments]
        keys = [
            own if segment.prefix is None else torch.cat([places[segment.prefix], own])
            for segment, own in zip(layout.segments, places, strict=True)
        ]
        shared = any(segment.prefix is not None for segment in layout.segments)
        return cls(
            query_ends=_ends(layout.lengths, device=device),
            key_ends=_ends([len(index) for index in keys], device=device),
            key_index=torch.cat(keys).to(device) if shared else None,
            longest_query=max(layout.lengths),
            longest_key=max(map(len, keys)),
        )


def _ends(lengths: Sequence[int], *, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
