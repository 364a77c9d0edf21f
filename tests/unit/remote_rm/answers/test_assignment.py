import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rm.answers.comparison import is_matchable
from remote_rm.box_verifier import best_pairs

pytestmark = pytest.mark.unit
generated = settings(max_examples=150, deadline=None, derandomize=True, database=None)

tables = st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


@pytest.mark.parametrize(
    ("weights", "pairs"),
    [
        ([], []),
        ([[]], []),
        ([[0.3]], [(0, 0)]),
        # The largest entry first would leave 0.9 + 0.1.
        ([[0.9, 0.8], [0.8, 0.1]], [(0, 1), (1, 0)]),
        ([[0.1, 0.5, 0.4]], [(0, 1)]),
        ([[0.1], [0.5], [0.4]], [(1, 0)]),
        # Each of the three prefers the first column; 0.7 + 0.6 + 0.5 is the most.
        ([[0.9, 0.7, 0.1], [0.9, 0.5, 0.6], [0.5, 0.1, 0.1]], [(0, 1), (1, 2), (2, 0)]),
    ],
)
def test_the_pairs_of_the_largest_sum(weights, pairs):
    assert best_pairs(weights) == pairs


@generated
@given(weights=tables)
def test_the_sum_is_what_scipy_finds(weights: list[list[float]]):
    from scipy.optimize import linear_sum_assignment

    pairs = best_pairs(weights)
    rows, columns = [row for row, _ in pairs], [column for _, column in pairs]
    assert rows == sorted(set(rows))
    assert len(set(columns)) == len(columns) == min(len(weights), len(weights[0]))
    theirs = zip(*linear_sum_assignment(weights, maximize=True), strict=True)
    # Eighths are exact.
    assert sum(weights[row][column] for row, column in pairs) == sum(weights[row][column] for row, column in theirs)


@pytest.mark.parametrize(
    ("table", "fits"),
    [
        ([], True),
        ([[True]], True),
        ([[False]], False),
        ([[True, True], [True, False]], True),
        ([[True, False], [True, False]], False),
    ],
)
def test_every_row_needs_a_column_of_its_own(table, fits):
    assert is_matchable(table) is fits
