"""Ranks in the order of nodes, on placement groups whose bundles Ray has spread over nodes in any order."""

import pytest

from lmm_r1.host.workers import by_node, groups_apart


def table(nodes: str) -> dict[int, str]:
    """The node of each bundle, a letter each, as `placement_group_table` gives it."""
    return dict(enumerate(nodes))


@pytest.mark.parametrize(
    ("nodes", "sizes", "order"),
    [
        ("abababab", [4], [0, 2, 4, 6, 1, 3, 5, 7]),
        ("bbaabbaa", [4], [0, 1, 4, 5, 2, 3, 6, 7]),
        ("aaaa", [1, 1], [0, 1, 2, 3]),
        ("baab", [], [0, 3, 1, 2]),
        # Three bundles on a, five on b: a pair and two pairs, then what is left of each.
        ("abbabbba", [2], [0, 3, 1, 2, 4, 5, 7, 6]),
        # Seven on each: fours first, then pairs, then single ones.
        ("aaaaaaabbbbbbb", [2, 4], [0, 1, 2, 3, 7, 8, 9, 10, 4, 5, 11, 12, 6, 13]),
        # Threes and fours at once: neither would stay whole behind the other but for whole twelves.
        ("a" * 12 + "b" * 3, [4, 3], list(range(15))),
    ],
)
def test_bundles_are_taken_node_by_node_with_groups_whole(nodes, sizes, order):
    assert by_node(table(nodes), sizes=sizes) == order


@pytest.mark.parametrize(
    ("nodes", "size", "apart"),
    [("aaaabbbb", 4, 0), ("aaaabbbb", 8, 1), ("aabbbbaa", 4, 2), ("abababab", 2, 4), ("abab", 1, 0), ("aaabbb", 2, 1)],
)
def test_groups_that_lie_on_several_nodes_are_counted(nodes, size, apart):
    assert groups_apart(nodes, size=size) == apart
