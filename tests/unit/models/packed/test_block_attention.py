"""FlexAttention over packed sequences: its mask against the layout's, its results against those segment by segment."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers.packed_batches import segments_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from lmm_r1.models.packed import attention
from lmm_r1.models.packed.attention import attend_in_blocks, fits_block_kernel, token_mask
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment

CPU = torch.device("cpu")


def layout_of(*groups: tuple[int, tuple[int, ...]], images: tuple[tuple[int, int], ...] = ()) -> PackedLayout:
    """Return prompts of some tokens with responses behind each; images are runs of tokens from one place to another."""
    segments: list[PackedSegment] = []
    for prompt, responses in groups:
        prefix, start = len(segments), segments[-1].end if segments else 0
        segments.append(PackedSegment(start=start, end=start + prompt))
        for response in responses:
            start = segments[-1].end
            segments.append(PackedSegment(start=start, end=start + response, prefix=prefix))
    blocks = torch.full((segments[-1].end,), -1)
    for number, (start, end) in enumerate(images):
        blocks[start:end] = number
    return PackedLayout(segments=tuple(segments), block_ids=blocks if images else None)


def tree_of(*nodes: tuple[int, int | None], image: tuple[int, int]) -> PackedLayout:
    """Return segments of some tokens, each with the segment that it goes on from; and an image of some tokens."""
    segments = segments_of(*nodes)
    blocks = torch.full((segments[-1].end,), -1)
    blocks[slice(*image)] = 0
    return PackedLayout(segments=segments, block_ids=blocks)


LAYOUTS = {
    "one sample": layout_of((7, ()), images=((1, 4),)),
    # Side by side, across all of a prompt, at the border of a prompt and in a response.
    "images": layout_of(
        (6, (3, 4)), (3, (2,)), (5, ()), images=((0, 2), (2, 4), (5, 6), (10, 12), (13, 16), (19, 22))
    ),
    "text": layout_of((5, (1, 3)), (4, ())),
    # Turns behind one another and branches from each of them, beside another tree; an image in a turn that is shared.
    "trees": tree_of((4, None), (5, 0), (6, 1), (3, 2), (2, 2), (3, 1), (2, 0), (5, None), (4, 7), image=(10, 13)),
    "trees of many tokens": tree_of((150, None), (100, 0), (60, 1), (80, 1), (90, 0), (130, None), image=(160, 210)),
    # A whole number of blocks, and prompts, responses and images across their borders.
    "many tokens": layout_of((190, (40, 90)), (64, ()), images=((100, 150), (200, 225))),
}
WINDOWS = [None, 1, 3, 100]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_token_sees_what_the_layouts_masks_say_and_nothing_of_other_segments(kind, window):
    layout = LAYOUTS[kind]
    expected = torch.zeros(layout.length, layout.length, dtype=torch.bool)
    for index, segment in enumerate(layout.segments):
        parts = [*(layout.segments[part] for part in layout.ancestors[index]), segment]
        keys = [key for part in parts for key in range(part.start, part.end)]
        expected[segment.start : segment.end, keys] = layout.mask(index, window=window, device=CPU)
    tokens = torch.arange(layout.length)
    sees = token_mask(layout, window=window, device=CPU)
    assert torch.equal(sees(0, 0, tokens[:, None], tokens[None]), expected)


def tensors(layout: PackedLayout, *, heads: int, key_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries (1, H, T, D), keys and values (1, K, T, D), as a model's projections give them."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, layout.length, count, 16, generator=generator) for count in (heads, key_heads, key_heads)]
    return [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in made]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_kernel", lambda: flex_attention)
    # PyTorch's reference has a backward pass on CPUs, too.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *given: None)


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_outputs_and_gradients_are_those_segment_by_segment(kind, window, heads, key_heads, uncompiled):
    layout = LAYOUTS[kind]
    given = tensors(layout, heads=heads, key_heads=key_heads, dtype=torch.float64)
    settings = {"window": window, "scaling": 0.3}
    mine = attend_in_blocks(*given, layout, **settings)
    theirs = attention._by_segment(*given, layout, **settings, dropout=0.0)
    assert mine.shape == theirs.shape
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1), dtype=mine.dtype)
    gradients = [torch.autograd.grad((output * weights).sum(), given) for output in (mine, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def on_gpu(*, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> SimpleNamespace:
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device=torch.device("cuda:0"), shape=(1, 4, 9, 16))


def test_it_takes_half_precision_on_gpus_without_dropout_where_it_compiles(monkeypatch):
    monkeypatch.setattr(attention, "_compiles", lambda *given: True)
    assert fits_block_kernel(on_gpu(), on_gpu(), dropout=0.0)
    assert not fits_block_kernel(on_gpu(), on_gpu(), dropout=0.1)
    assert not fits_block_kernel(on_gpu(dtype=torch.float32), on_gpu(), dropout=0.0)
    assert not fits_block_kernel(on_gpu(is_cuda=False), on_gpu(), dropout=0.0)
    monkeypatch.setattr(attention, "_compiles", lambda *given: False)
    assert not fits_block_kernel(on_gpu(), on_gpu(), dropout=0.0)


def test_the_kernel_is_compiled_once_with_gradients_and_once_without_whatever_the_sequence_is(monkeypatch):
    """Without a break: what is not compiled would compute the scores of all tokens with all."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *given: None)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(
        attention, "_kernel", lambda: torch.compile(flex_attention, fullgraph=True, dynamic=True, backend=counter)
    )
    compiled = []
    torch._dynamo.reset()
    for with_gradients in (True, False):
        for kind, window in itertools.product(("many tokens", "images", "text"), (None, 60, 70)):
            given = tensors(LAYOUTS[kind], heads=6, key_heads=2, dtype=torch.float32)
            settings = {"window": window, "scaling": 0.3}
            with torch.set_grad_enabled(with_gradients):
                output = attend_in_blocks(*given, LAYOUTS[kind], **settings)
                expected = attention._by_segment(*given, LAYOUTS[kind], **settings, dropout=0.0)
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
        compiled.append(counter.frame_count)
    torch._dynamo.reset()
    assert compiled == [1, 2]


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    attention._compiles.cache_clear()
    yield
    attention._compiles.cache_clear()


def compiles() -> bool:
    return attention._compiles(CPU, torch.float32, 2, 1, 16)


def test_where_it_does_not_the_run_goes_on_and_warns_once(asked_anew, monkeypatch, caplog):
    def fail() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(attention, "_kernel", fail)
    assert not compiles()
    assert not compiles()
    assert caplog.text.count("Failed to find C compiler") == 1
