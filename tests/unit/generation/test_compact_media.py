"""Media tensors come back bit by bit from as few bytes as hold them, whatever processor made them."""

import math

import pytest
import torch

from lmm_r1.generation.media_store import CodedTensor, StoredTensor, compact_tensor

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# A table of 256 values in fp32.
TABLE = 1024


def colours(*shape: int) -> torch.Tensor:
    """Bytes of which all 256 occur in each colour."""
    made = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return made


def normalised(values: torch.Tensor, *, shape: tuple[int, ...]) -> torch.Tensor:
    """Pixel values as processors make them, with mean and deviation of each colour in a dimension of `shape`."""
    mean, std = (torch.tensor(numbers).view(shape) for numbers in (MEAN, STD))
    return (values * (1 / 255) - mean) / std


def patches(*, temporal: int = 2, side: int = 4) -> torch.Tensor:
    """Patches as of Qwen: each a flat row of colour by colour, of `temporal` frames of side x side pixels."""
    one = colours(60, 3, temporal, side, side)
    return normalised(one, shape=(1, 3, 1, 1, 1)).view(60, -1)


SHARED_RANGE = (colours(2, 3, 32, 32).float() / 255 - 0.5) / 0.5
LAYOUTS = {
    "colours outermost in flat patches": (patches(), 3),
    "of odd sides": (patches(temporal=1, side=5), 3),
    "images": (normalised(colours(2, 3, 30, 32), shape=(1, 3, 1, 1)), 3),
    "crops of images": (normalised(colours(2, 4, 3, 14, 16), shape=(1, 1, 3, 1, 1)), 3),
    "colours innermost": (normalised(colours(40, 50, 3), shape=(1, 1, 3)), 3),
    "colours innermost in flat patches": (normalised(colours(40, 50, 3), shape=(1, 1, 3)).view(40, 150), 3),
    "one range for all colours": (SHARED_RANGE, 1),
    "a mask of whole numbers": (torch.ones(1, 64, 64, dtype=torch.long), 1),
    "half precision": (normalised(colours(2, 3, 30, 32), shape=(1, 3, 1, 1)).half(), 3),
}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("name", LAYOUTS)
def test_pixel_values_take_a_byte_each_and_come_back_bit_by_bit(name):
    values, channels = LAYOUTS[name]
    packed = compact_tensor(values)
    assert isinstance(packed, CodedTensor)
    assert packed.tables.shape == (channels, 256)
    assert packed.nbytes == values.numel() + channels * 256 * values.element_size()
    assert same_bits(packed.expand(), values)


def test_more_values_than_there_are_codes_are_never_rounded():
    values = torch.arange(257.0).repeat(20) / 3
    kept = compact_tensor(values)
    assert (type(kept), kept.stored, kept.nbytes) == (StoredTensor, torch.float32, values.numel() * 4)
    assert same_bits(kept.expand(), values)
    # One less.
    assert compact_tensor(torch.arange(256.0).repeat(20) / 3).nbytes == 256 * 20 + TABLE


def test_values_that_bf16_holds_take_two_bytes():
    values = torch.arange(-5000.0, 5000.0).bfloat16().float() + 0.0
    assert len(values.unique()) > 256
    packed = compact_tensor(values)
    assert (type(packed), packed.stored, packed.nbytes) == (StoredTensor, torch.bfloat16, 20_000)
    assert same_bits(packed.expand(), values)
    # 257 takes nine bits of a mantissa of eight.
    values[-1] = 257.0
    assert compact_tensor(values).stored == torch.float32


def test_every_bit_counts():
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45])
    for values in (odd, odd.repeat(1000), odd[:5].repeat(1000)):
        assert same_bits(compact_tensor(values).expand(), values)
    assert isinstance(compact_tensor(odd[:5].repeat(1000)), CodedTensor)


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([[1, 24, 36]]),
        torch.tensor(0.1),
        torch.zeros(0, 3, dtype=torch.long),
        torch.tensor([True, False]),
        torch.arange(10, dtype=torch.uint8),
        torch.randn(3, 5).bfloat16(),
        torch.randn(100, 60)[:, ::2],
        torch.randn(90, 90, dtype=torch.float64),
        torch.randn(60, 100).t().requires_grad_(),
    ],
)
def test_everything_else_travels_as_it_is(values):
    packed = compact_tensor(values)
    assert (type(packed), packed.stored, packed.nbytes) == (StoredTensor, values.dtype, values.nbytes)
    expected = values.detach().contiguous()
    assert torch.equal(packed.expand(), expected)
    assert packed.expand().dtype == expected.dtype
