"""Loaders of YAML from elsewhere, which refuse a document that is too deep, or whose aliases would fill the memory."""

from typing import Any

import yaml

MOST_NODES = 1_000_000
MOST_LEVELS = 64


class _Bounded:
    def get_single_node(self: Any) -> yaml.Node | None:
        """Return the root of the document; raises MarkedYAMLError if it is beyond the limits, or holds itself."""
        try:
            node = super().get_single_node()  # type: ignore[misc]
            if node is None or _count(node, {}, MOST_LEVELS) <= MOST_NODES:
                return node
        except RecursionError:
            pass
        raise yaml.MarkedYAMLError(
            problem=f"it has more than {MOST_LEVELS} levels, or its aliases stand for more than {MOST_NODES:,} values"
        )


class SafeLoader(_Bounded, yaml.SafeLoader):
    """PyYAML's, with limits."""


class BaseLoader(_Bounded, yaml.BaseLoader):
    """PyYAML's, with limits: every value stays a text."""


def _count(node: yaml.Node, known: dict[int, int], levels: int) -> int:
    """Return the number of nodes with every alias written out."""
    if not levels:
        return MOST_NODES + 1
    if id(node) not in known:
        inner = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            inner = [one for pair in node.value for one in pair]
        known[id(node)] = 1 + sum(_count(one, known, levels - 1) for one in inner)
    return known[id(node)]
