"""Gives the rows of a table columns of their own: so that every pair fits, or so that their sum is the largest."""

from collections.abc import Sequence
from math import inf


def is_matchable(table: Sequence[Sequence[bool]]) -> bool:
    """Return whether each row can be given a column of its own where it is true.

    Where what fits is not transitive, taking the first fitting column might be a mistake.
    """
    row_of: dict[int, int] = {}

    def find_column(row: int, seen: set[int]) -> bool:
        for column, fits in enumerate(table[row]):
            if fits and column not in seen:
                seen.add(column)
                if column not in row_of or find_column(row_of[column], seen):
                    row_of[column] = row
                    return True
        return False

    return all(find_column(row, set()) for row in range(len(table)))


def best_pairs(weights: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return the pairs (row, column) of the largest sum, as many as the shorter side is long, in the order of the rows.

    The Hungarian method, by shortest augmenting paths, O(shorter² · longer): Kuhn 1955; Jonker and Volgenant 1987. In
    plain Python: scipy's arrays and threads would take much of the address space that a worker is given.

    Args:
        weights: finite numbers, by row and column; every row has as many.
    """
    if not weights or not weights[0]:
        return []
    if len(weights) > len(weights[0]):
        return sorted((row, column) for column, row in best_pairs(list(zip(*weights, strict=True))))
    assignment = _Assignment(weights)
    for row in range(len(weights)):
        assignment.add(row)
    return list(enumerate(assignment.column_of))


class _Assignment:
    """The best pairs of the rows that were added; there are at least as many columns as rows.

    No pair costs less than the prices of its row and its column together, and those that were taken cost just that.
    """

    def __init__(self, weights: Sequence[Sequence[float]]) -> None:
        self._weights = weights
        self._row_price = [0.0] * len(weights)
        self._column_price = [0.0] * len(weights[0])
        self._row_of: dict[int, int] = {}
        self.column_of: list[int] = []

    def add(self, row: int) -> None:
        """Give the next row a column, and others new ones where that is better."""
        distance = [inf] * len(self._column_price)
        reached_from = [row] * len(distance)
        unseen, length, at = set(range(len(distance))), 0.0, row
        path: list[int] = []
        while True:
            for column in unseen:
                cost = -self._weights[at][column] - self._row_price[at] - self._column_price[column]
                if length + cost < distance[column]:
                    distance[column], reached_from[column] = length + cost, at
            nearest = min(unseen, key=distance.__getitem__)
            unseen.remove(nearest)
            length = distance[nearest]
            if nearest not in self._row_of:
                break
            path.append(nearest)
            at = self._row_of[nearest]
        self._row_price[row] += length
        for column in path:
            self._row_price[self._row_of[column]] += length - distance[column]
            self._column_price[column] -= length - distance[column]
        self._take(row, nearest, reached_from)

    def _take(self, row: int, column: int, reached_from: Sequence[int]) -> None:
        """Walk the path from a free column back to the new row, and pair along it."""
        self.column_of.append(-1)
        while True:
            taker = reached_from[column]
            left = self.column_of[taker]
            self._row_of[column], self.column_of[taker] = taker, column
            if taker == row:
                return
            column = left
