import pytest
import torch

from lmm_r1.models.image_features import LINE, _numbers, fingerprints


def wrapped(value: int) -> int:
    """Return a whole number as one of 64 bits with a sign."""
    return (value + 2**63) % 2**64 - 2**63


def sums(words: list[int], round_of: int) -> list[int]:
    """Return both hashes of one line, by whole numbers of Python."""
    rows = _numbers("cpu")[round_of].tolist()
    return [wrapped(sum(number * word for number, word in zip(row, words, strict=False))) for row in rows]


def test_a_line_is_a_sum_of_products_that_wraps_around():
    words = [3, -7, 32767, -32768]
    assert fingerprints([torch.tensor(words, dtype=torch.int16)]) == [tuple(sums(words, 0))]


def test_lines_are_summed_up_again_as_words_of_their_sums():
    words = torch.arange(LINE + 2, dtype=torch.int16)
    first, second = sums(words[:LINE].tolist(), 0), sums(words[LINE:].tolist(), 0)
    pieces = torch.tensor([first, second]).view(torch.int16).flatten().tolist()
    assert fingerprints([words]) == [tuple(sums(pieces, 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_equal_contents_have_one_name_and_any_other_number_another(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (3, 50, 70), generator=generator).to(dtype)
    name = fingerprints([values])
    assert fingerprints([values.transpose(1, 2).contiguous().transpose(1, 2)]) == name
    names = list(name)
    for place in torch.randperm(values.numel(), generator=generator)[:40].tolist():
        other = values.clone()
        other.view(-1)[place] = 1 - values.view(-1)[place].long()
        names += fingerprints([other])
    assert len(set(names)) == 41
    assert fingerprints([values[:1], values[1:]]) == [*fingerprints([values[:1]]), *fingerprints([values[1:]])]


def test_parts_that_change_places_make_another_name():
    values = torch.randn(2, LINE, generator=torch.Generator().manual_seed(0))
    assert fingerprints([values]) != fingerprints([values.flip(0)])


def test_nothing_has_a_name_too():
    assert fingerprints([]) == []
    assert len(fingerprints([torch.empty(0, 4)])) == 1
