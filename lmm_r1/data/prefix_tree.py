"""The common prefixes of samples as a tree: equal tokens with equal media."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lmm_r1.data.sample import PlacedMedia, PlacedRef

# The fewest tokens for which a prefix shared by only some samples becomes a node: the keys of all tokens before a node
# are copied once more for it. Shorter prefixes stay with each sample.
LEAST_SHARED = 16


@dataclass(frozen=True, kw_only=True)
class TreeSample:
    """The tokens of a sample, and its media with their positions."""

    token_ids: np.ndarray
    """Without padding, (L,)."""
    media: Sequence[PlacedRef | PlacedMedia] = ()


@dataclass(frozen=True, kw_only=True)
class PrefixNode:
    """Tokens `start` to `end`, which are the same in all `samples` of the node, as are all tokens before them."""

    start: int
    end: int
    parent: int | None
    """Index of the node whose tokens come before `start`; None for a root."""
    samples: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.end - self.start


def prefix_tree(samples: Sequence[TreeSample], *, known: int) -> tuple[PrefixNode, ...]:
    """Return the nodes of a tree in pre-order: each comes after its parent, followed by its own children.

    The first node holds the prefix of all samples. Media are shared with their whole segment or not at all: no node ends
    within a segment with media.

    Args:
        known: the number of tokens at the start that are known to be equal, with their media.
    """
    grown = _Tree(_comparable(samples, known=known), known=known)
    grown.grow(tuple(range(len(samples))), start=0, parent=None)
    return tuple(grown.nodes)


def _comparable(samples: Sequence[TreeSample], *, known: int) -> list[np.ndarray]:
    """Return each sample's tokens after the first `known`, (L - known,); a segment with media has one number per content."""
    numbers: dict[Hashable, int] = {}
    rows = []
    for sample in samples:
        row = sample.token_ids.astype(np.int64)
        items = [item for item in sample.media if item.start >= known]
        # A segment without a known end may reach up to the next one.
        ends = [*(item.start for item in items[1:]), len(row)]
        for item, latest in zip(items, ends, strict=False):
            end = latest if item.end is None else item.end
            content = (item.key, sample.token_ids[item.start : end].tobytes())
            row[item.start : end] = -1 - numbers.setdefault(content, len(numbers))
        rows.append(row[known:])
    return rows


class _Tree:

    def __init__(self, rows: Sequence[np.ndarray], *, known: int) -> None:
        self.rows = rows
        self.known = known
        self.nodes: list[PrefixNode] = []

    def grow(self, members: tuple[int, ...], *, start: int, parent: int | None) -> None:
        """Add a node for the common prefix from `start` on, if it is long enough, and the nodes below it."""
        end = self.known + common_length([self.rows[member] for member in members])
        ended = [member for member in members if self._length(member) == end]
        is_worth_it = parent is None or len(ended) == len(members) or end - start >= LEAST_SHARED
        if end > start and is_worth_it:
            self.nodes.append(PrefixNode(start=start, end=end, parent=parent, samples=members))
            start, parent = end, len(self.nodes) - 1
        parts: dict[int | None, list[int]] = {}
        for member in members:
            if self._length(member) > end:
                parts.setdefault(int(self.rows[member][end - self.known]), []).append(member)
            elif start < end:
                # A sample that ends with a run too short for a node keeps the run to itself.
                parts.setdefault(None, []).append(member)
        for part in parts.values():
            self.grow(tuple(part), start=start, parent=parent)

    def _length(self, member: int) -> int:
        return self.known + len(self.rows[member])


def common_length(rows: Sequence[np.ndarray]) -> int:
    """Return the length of the common prefix of all rows."""
    first, length = rows[0], min(map(len, rows))
    for row in rows[1:]:
        different = np.flatnonzero(first[:length] != row[:length])
        if len(different):
            length = int(different[0])
    return length
