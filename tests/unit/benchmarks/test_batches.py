"""Rows within a number of tokens, the most rows that fit, and weights in buckets."""

import pytest
import torch
from gpu_stages.subject import first_rows, rows_within
from gpu_stages.transfer import _buckets
from gpu_stages.updates import largest
from train_batches import GroupBatch


def test_rows_within_a_number_of_tokens_count_each_prompt_once():
    sizes = {"prompts": (10, 20), "responses": (3, 4, 5, 6), "samples": 2}
    # 13, 17; 42, 48 with the second prompt.
    expected = {12: 0, 13: 1, 16: 1, 17: 2, 41: 2, 42: 3, 47: 3, 48: 4, 1000: 4}
    assert {tokens: rows_within(tokens, **sizes) for tokens in expected} == expected


def test_the_first_rows_of_a_batch_are_as_wide_as_the_longest_of_them():
    media = [{"pixel_values": torch.zeros(4, 1)}, {"pixel_values": torch.zeros(4, 1)}]
    lengths, prompts = (2, 3, 1, 4), (2, 3)
    rows = [torch.arange(1, prompts[row // 2] + length + 1) for row, length in enumerate(lengths)]
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    action_mask = torch.zeros(4, 7, dtype=torch.bool)
    for row, length in enumerate(lengths):
        action_mask[row, prompts[row // 2] : prompts[row // 2] + length] = True
    batch = GroupBatch(
        sequences=sequences,
        attention_mask=(sequences > 0).long(),
        action_mask=action_mask[:, 1:],
        media=[media[0], media[0], media[1], media[1]],
        samples=2,
        prompt_lengths=prompts,
        response_lengths=lengths,
    )
    cut = first_rows(batch, 3, samples=2)
    assert cut.sequences.tolist() == [[1, 2, 3, 4, 0], [1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]
    assert cut.action_mask.tolist() == [
        [False, True, True, False],
        [False, True, True, True],
        [False, False, True, False],
    ]
    assert cut.media[2] is media[1]
    assert cut.unique_tokens == 2 + 3 + 2 + 3 + 1
    samples = cut.for_model
    assert [(one.group, one.prompt_tokens, len(one.token_ids)) for one in samples] == [(0, 2, 4), (0, 2, 5), (1, 3, 4)]
    assert samples[2].loss_mask.tolist() == [False, False, True]
    assert first_rows(batch, 2, samples=2).prompt_lengths == (2,)


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 7, 16, 17, 18, 100])
def test_up_to_twenty_rows_the_largest_number_that_fits_is_found_exactly(answer):
    tried = []

    def fits(rows):
        tried.append(rows)
        return rows <= answer

    assert largest(fits, first=4, most=18) == min(answer, 18)
    assert len(tried) == len(set(tried)) <= 6
    assert max(tried) <= 18


def test_beyond_that_it_is_found_to_a_twentieth():
    for answer in range(300):
        found = largest(lambda rows: rows <= answer, first=7, most=400)  # noqa: B023  # called before it changes
        assert answer - max(1, answer // 20) <= found <= answer


def test_buckets_hold_all_weights_in_order_within_the_limit():
    weights = {str(index): torch.zeros(size, dtype=torch.uint8) for index, size in enumerate((4, 4, 3, 20, 1, 1))}
    assert [list(bucket) for bucket in _buckets(weights, 8)] == [["0", "1"], ["2"], ["3"], ["4", "5"]]
