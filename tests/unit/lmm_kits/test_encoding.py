from types import SimpleNamespace

import pytest
import torch
from helpers.tables import frozen

from lmm_r1.lmm_kits import get_kit
from lmm_r1.lmm_kits.encoding import bounded_size, collapse_runs, ids_beyond_tokenizer, text_positions


def test_positions_count_attended_tokens_on_either_side_of_the_padding():
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    assert text_positions(mask).tolist() == [[0, 1, 2, 2, 2], [0, 0, 0, 1, 2]]


def test_media_are_joined_in_row_order_where_a_row_lacks_a_key():
    one = {"pixels": torch.tensor([[1.0], [2.0]]), "grid": torch.tensor([[1, 2]])}
    other = {"pixels": torch.tensor([[3.0]])}
    merged = get_kit("llm").merge_media([one, other])
    assert {key: value.tolist() for key, value in merged.items()} == {
        "pixels": [[1.0], [2.0], [3.0]],
        "grid": [[1, 2]],
    }


@pytest.mark.parametrize(
    ("ids", "collapsed"),
    [
        ([1, 9, 9, 9, 2], [1, 9, 2]),
        ([9, 9, 1, 9], [9, 1, 9]),
        ([8, 8, 9, 9, 8], [8, 9, 8]),
        ([1, 1, 2, 2], [1, 1, 2, 2]),
        ([], []),
    ],
)
def test_one_of_each_run_of_equal_placeholders_is_kept(ids, collapsed):
    assert collapse_runs(ids, placeholders=frozenset({8, 9})) == collapsed


class SizedTokenizer:
    def __len__(self) -> int:
        return 7


def test_ids_that_only_pad_the_vocabulary_are_beyond_the_tokenizer():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=10))
    assert ids_beyond_tokenizer(config, SizedTokenizer()) == (7, 8, 9)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    frozen("lmm_kits/encoding", "sides_are_multiples_of_the_factor_with_an_area_inside_the_bounds"),
)
def test_sides_are_multiples_of_the_factor_with_an_area_inside_the_bounds(height, width, expected):
    size = bounded_size(height=height, width=width, factor=28, min_pixels=3136, max_pixels=16000)
    assert size == expected


def test_the_upper_bound_wins_where_the_bounds_leave_no_multiple_between_them():
    assert bounded_size(height=100, width=100, factor=28, min_pixels=50000, max_pixels=50000) == (224, 196)
    assert bounded_size(height=5, width=5, factor=28, min_pixels=10, max_pixels=10) == (28, 28)
