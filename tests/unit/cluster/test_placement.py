"""Ranks in the order of nodes, on placement groups whose bundles Ray has spread over nodes in any order."""

import pytest

from lmm_r1.cluster.nodes import by_node


@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        ("abababab", (0, 2, 4, 6, 1, 3, 5, 7)),
        ("bbaabbaa", (2, 3, 6, 7, 0, 1, 4, 5)),
        ("aaaa", (0, 1, 2, 3)),
        # Three bundles on a, five on b.
        ("abbabbba", (1, 2, 4, 5, 6, 0, 3, 7)),
    ],
)
def test_bundles_are_taken_node_by_node(nodes, order):
    assert by_node(dict(enumerate(nodes))) == order
