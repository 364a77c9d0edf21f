"""Masks of segments and the layout for kernels of varying lengths, worked out by hand."""

import pytest
import torch
from helpers.packed_batches import segments_of

from lmm_r1.models.packed.layout import PackedLayout, PackedSegment, VarlenLayout

CPU = torch.device("cpu")
# A prompt of three tokens, two responses that share it, and a sample of four tokens by itself.
SHARED = segments_of((3, None), (2, 0), (1, 0), (4, None))


def mask(layout: PackedLayout, index: int, *, window: int | None = None) -> list[list[int]]:
    return layout.mask(index, window=window, device=CPU).int().tolist()


def test_a_sequence_is_as_long_as_its_segments():
    layout = PackedLayout(segments=SHARED)
    assert layout.length == 10
    assert layout.lengths == (3, 2, 1, 4)
    assert [layout.prefix_length(segment) for segment in SHARED] == [0, 3, 3, 0]


def test_a_response_attends_to_all_of_the_prompt_and_to_itself_backwards():
    layout = PackedLayout(segments=SHARED)
    assert mask(layout, 1) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert mask(layout, 2) == [[1, 1, 1, 1]]


def test_a_segment_without_prefix_block_or_window_is_plainly_causal():
    layout = PackedLayout(segments=SHARED)
    assert [layout.is_plain(index, window=None) for index in range(4)] == [True, False, False, True]
    assert mask(layout, 0) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_window_counts_the_token_itself_and_reaches_back_into_the_prefix():
    layout = PackedLayout(segments=SHARED)
    assert mask(layout, 3, window=2) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert mask(layout, 1, window=3) == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert layout.is_plain(3, window=3) is False


def test_a_run_attends_in_both_directions_within_itself():
    # An image of two tokens behind one of text, with a text behind it, and two images side by side.
    blocks = torch.tensor([-1, 0, 0, -1, 1, 1, 2, 2])
    layout = PackedLayout(segments=segments_of((4, None), (4, None)), block_ids=blocks)
    assert layout.has_block == (True, True)
    assert mask(layout, 0) == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert mask(layout, 1) == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_a_window_cuts_a_run_behind_a_token_but_not_before_it():
    blocks = torch.tensor([0, 0, 0, -1])
    layout = PackedLayout(segments=(PackedSegment(start=0, end=4),), block_ids=blocks)
    assert mask(layout, 0, window=2) == [[1, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_kernels_get_where_queries_and_keys_end_and_prefixes_once_for_each_segment():
    varlen = PackedLayout(segments=SHARED).varlen(device=CPU)
    assert varlen.query_ends.tolist() == [0, 3, 5, 6, 10]
    assert varlen.key_ends.tolist() == [0, 3, 8, 12, 16]
    assert varlen.key_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9]
    assert varlen.own_keys.tolist() == [0, 1, 2, 6, 7, 11, 12, 13, 14, 15]
    (prefix,) = varlen.prefixes
    assert prefix.start == 0
    assert prefix.copies.tolist() == [[0, 1, 2], [3, 4, 5], [8, 9, 10]]
    assert (varlen.longest_query, varlen.longest_key) == (4, 5)
    assert varlen.query_ends.dtype is varlen.key_ends.dtype is torch.int32


def test_without_prefixes_keys_are_taken_as_they_stand():
    layout = PackedLayout(segments=segments_of((2, None), (3, None)))
    varlen = VarlenLayout.of(layout, device=CPU)
    assert varlen.prefixes == ()
    assert varlen.key_index.tolist() == varlen.own_keys.tolist() == [0, 1, 2, 3, 4]
    assert varlen.query_ends.tolist() == varlen.key_ends.tolist() == [0, 2, 5]
    assert layout.varlen(device=CPU) is layout.varlen(device=CPU), "made once for all layers"


# A prompt of two tokens; behind it a turn of two that a third of one and a fourth of two go on from; and one response more.
TREE = segments_of((2, None), (2, 0), (1, 1), (2, 1), (1, 0), (1, None))


def test_each_part_of_a_prefix_has_all_that_goes_on_from_it_behind_it():
    layout = PackedLayout(segments=TREE)
    assert layout.tree_ends == (8, 7, 5, 7, 8, 9)


def test_kernels_get_all_parts_of_a_prefix_for_each_segment():
    varlen = PackedLayout(segments=TREE).varlen(device=CPU)
    assert varlen.query_ends.tolist() == [0, 2, 4, 5, 7, 8, 9]
    assert varlen.key_ends.tolist() == [0, 2, 6, 11, 17, 20, 21]
    assert varlen.key_index.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 6, 0, 1, 7, 8]
    assert varlen.own_keys.tolist() == [0, 1, 4, 5, 10, 15, 16, 19, 20]
    prompt, turn = varlen.prefixes
    assert (prompt.start, prompt.copies.tolist()) == (0, [[0, 1], [2, 3], [6, 7], [11, 12], [17, 18]])
    assert (turn.start, turn.copies.tolist()) == (2, [[4, 5], [8, 9], [13, 14]])


def test_trees_stand_in_pre_order():
    torn = segments_of((1, None), (1, None), (1, 0))
    with pytest.raises(AssertionError, match="stand behind one another"):
        PackedLayout(segments=torn)
