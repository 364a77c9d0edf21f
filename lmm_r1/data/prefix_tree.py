"""What samples have in common from their first token on, as a tree: equal tokens and the same media, up to a point."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lmm_r1.data.sample import PlacedMedia, PlacedRef

# A run that not all samples of a tree have is worth a node of its own from so many tokens on: GPUs copy the keys of all
# tokens before it once more for it. Shorter ones stay with each sample.
LEAST_SHARED = 16


@dataclass(frozen=True, kw_only=True)
class TreeSample:
    """The tokens of a sample, and where its media stand."""

    token_ids: np.ndarray
    """Without padding, (L,)."""
    media: Sequence[PlacedRef | PlacedMedia] = ()


@dataclass(frozen=True, kw_only=True)
class Node:
    """Tokens `start` to `end` of each of its samples, which are the same in all of them, as is all before them."""

    start: int
    end: int
    parent: int | None
    """Index of the node whose tokens stand before `start`; None for the first tokens of a tree."""
    samples: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.end - self.start


def prefix_tree(samples: Sequence[TreeSample], *, known: int) -> tuple[Node, ...]:
    """Return the nodes of a tree in pre-order: each stands behind its parent and before whatever is no child of that.

    The first node holds what all samples have in common. Media are shared together with their whole segment, or not at
    all: no node ends within one.

    Args:
        known: so many tokens at the start are known to be the same, with their media.
    """
    grown = _Tree(_comparable(samples, known=known), known=known)
    grown.grow(tuple(range(len(samples))), start=0, parent=None)
    return tuple(grown.nodes)


def _comparable(samples: Sequence[TreeSample], *, known: int) -> list[np.ndarray]:
    """Return each sample's tokens behind the first `known`, (L - known,): those of a segment with media as its number."""
    numbers: dict[Hashable, int] = {}
    rows = []
    for sample in samples:
        row = sample.token_ids.astype(np.int64)
        items = [item for item in sample.media if item.start >= known]
        # Of a segment that does not say where it ends, nothing before the next one is its own for sure.
        ends = [*(item.start for item in items[1:]), len(row)]
        for item, latest in zip(items, ends, strict=False):
            end = latest if item.end is None else item.end
            content = (item.key, sample.token_ids[item.start : end].tobytes())
            row[item.start : end] = -1 - numbers.setdefault(content, len(numbers))
        rows.append(row[known:])
    return rows


class _Tree:
    """Grows a tree from its first node on."""

    def __init__(self, rows: Sequence[np.ndarray], *, known: int) -> None:
        self.rows = rows
        self.known = known
        self.nodes: list[Node] = []

    def grow(self, members: tuple[int, ...], *, start: int, parent: int | None) -> None:
        """Add what samples have in common from `start` on, where it is worth a node, and what follows it."""
        end = self.known + common_length([self.rows[member] for member in members])
        ended = [member for member in members if self._length(member) == end]
        is_worth_it = parent is None or len(ended) == len(members) or end - start >= LEAST_SHARED
        if end > start and is_worth_it:
            self.nodes.append(Node(start=start, end=end, parent=parent, samples=members))
            start, parent = end, len(self.nodes) - 1
        parts: dict[int | None, list[int]] = {}
        for member in members:
            if self._length(member) > end:
                parts.setdefault(int(self.rows[member][end - self.known]), []).append(member)
            elif start < end:
                # What ends with a run that is no node keeps it to itself.
                parts.setdefault(None, []).append(member)
        for part in parts.values():
            self.grow(tuple(part), start=start, parent=parent)

    def _length(self, member: int) -> int:
        return self.known + len(self.rows[member])


def common_length(rows: Sequence[np.ndarray]) -> int:
    """Return how many numbers at their start are the same in all rows."""
    first, length = rows[0], min(map(len, rows))
    for row in rows[1:]:
        different = np.flatnonzero(first[:length] != row[:length])
        if len(different):
            length = int(different[0])
    return length
