"""Media tensors come back bit by bit from as few bytes as hold them, whatever processor made them."""

import math
import pickle

import numpy
import pytest
import torch

from lmm_r1.generation.media_store import CodedTensor, StoredTensor, compact, compact_tensor

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


def test_a_value_that_a_sample_of_them_misses_has_a_code_too():
    values = torch.zeros(200_000)
    values[[17, 99_999, 199_999]] = torch.tensor([1.0, -2.0, 0.3])
    packed = compact_tensor(values)
    assert packed.nbytes == 200_000 + TABLE
    assert same_bits(packed.expand(), values)


def test_more_values_than_there_are_codes_are_never_rounded():
    values = torch.arange(257.0).repeat(20) / 3
    kept = compact_tensor(values)
    assert (type(kept), kept.stored, kept.nbytes) == (StoredTensor, torch.float32, values.numel() * 4)
    assert same_bits(kept.expand(), values)
    # One less.
    assert compact_tensor(torch.arange(256.0).repeat(20) / 3).nbytes == 256 * 20 + TABLE


def test_values_that_differ_in_their_last_bits_alone_are_never_mixed_up():
    # 1 and the number behind it.
    values = torch.tensor([1.0, 1.0 + 2**-23]).repeat(4096)
    kept = compact_tensor(values)
    assert (type(kept), kept.stored) == (StoredTensor, torch.float32)
    assert same_bits(kept.expand(), values)
    # Told apart only by values that a sample of them misses.
    values = torch.zeros(200_000)
    values[[17, 99_999]] = torch.tensor([1.0, 1.0 + 2**-23])
    assert same_bits(compact_tensor(values).expand(), values)


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


def test_media_are_the_same_behind_memory_that_can_only_be_read():
    media = {"pixel_values": patches(), "image_grid_thw": torch.tensor([[1, 6, 10]]), "scale": torch.randn(7)}
    buffers: list[pickle.PickleBuffer] = []
    packed = compact(media)
    told = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert len(told) < 1000, "values are not pickled, and so not copied"
    # As Ray's object store gives them.
    read_only = [memoryview(bytes(buffer.raw())).toreadonly() for buffer in buffers]
    given = pickle.loads(told, buffers=read_only)
    assert given.nbytes == packed.nbytes == 60 * 96 + 3 * TABLE + 3 * 8 + 7 * 4
    expanded = given.expand()
    assert list(expanded) == list(media)
    for name, value in media.items():
        assert same_bits(expanded[name], value)
        # Of its own: to write to it changes nothing that others read.
        expanded[name].zero_()
    assert same_bits(given.expand()["scale"], media["scale"])
    assert all(isinstance(buffer, memoryview) and buffer.readonly for buffer in read_only)


def test_it_is_not_known_how_a_processor_rounds():
    """Other orders of the same operations give other bits: codes stand for what was there, and not for a formula."""
    values = colours(1, 3, 40, 40)
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (MEAN, STD))
    fused = (values - mean * 255) / (std * 255)
    apart = (values * (1 / 255) - mean) / std
    exact = torch.from_numpy(((values.numpy() / 255 - mean.numpy()) / std.numpy()).astype(numpy.float32))
    assert not torch.equal(fused, apart)
    for made in (fused, apart, exact):
        packed = compact_tensor(made)
        assert isinstance(packed, CodedTensor)
        assert same_bits(packed.expand(), made)
