"""Gradients of a shared prefix: a sum over its responses that half precision rounds once, on every way."""

from collections.abc import Callable

import pytest
import torch
from helpers.packed_batches import segments_of
from helpers.varlen_kernels import of_torch
from torch.nn.functional import scaled_dot_product_attention

from lmm_r1.models.packed import attention
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment, repeat_prefixes, varlen_kernel

CPU = torch.device("cpu")
# A prompt of two tokens with responses of one and two, and a sample of one token between the prompt and another.
LAYOUT = PackedLayout(segments=segments_of((2, None), (1, 0), (2, 0), (1, None), (1, None), (1, 4)))
# bfloat16 keeps eight bits, the leading one among them.
ROUNDING = 2**-8
# A rounding's own is about 0.0016; a sum in bfloat16 is off by 0.003 and more.
ONCE = 0.0022


@pytest.mark.parametrize("dim", [0, 2])
def test_keys_go_to_every_segment_and_their_gradients_come_back_as_a_sum(dim):
    tokens = torch.arange(1.0, 9.0).view([-1 if place == dim else 1 for place in range(3)]).requires_grad_()
    repeated = repeat_prefixes(tokens, LAYOUT.varlen(device=CPU), dim=dim)
    assert repeated.flatten().tolist() == [1, 2, 1, 2, 3, 1, 2, 4, 5, 6, 7, 7, 8]
    repeated.backward(torch.arange(1.0, 14.0).view(repeated.shape))
    # 1 + 3 + 6 and 2 + 4 + 7 for the first prompt, 11 + 12 for the second.
    assert tokens.grad.flatten().tolist() == [10, 13, 5, 8, 9, 10, 23, 13]


def group(*, prompt: int = 24, responses: int = 16, length: int = 8) -> PackedLayout:
    starts = [prompt + index * length for index in range(responses)]
    return PackedLayout(
        segments=(
            PackedSegment(start=0, end=prompt),
            *(PackedSegment(start=start, end=start + length, prefix=0) for start in starts),
        )
    )


def test_sixteen_copies_in_half_precision_are_rounded_once():
    layout = group()
    varlen = layout.varlen(device=CPU)
    keys = torch.zeros(layout.length, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    # Of one sign, as contributions to what all responses have in common are.
    gradient = torch.rand(len(varlen.key_index), 2, 8, generator=generator).bfloat16()
    repeat_prefixes(keys, varlen, dim=0).backward(gradient)
    exact = torch.zeros(keys.shape, dtype=torch.float64).index_add_(0, varlen.key_index, gradient.double())
    errors = ((keys.grad.double() - exact) / exact).abs()
    assert float(errors.max()) <= ROUNDING * 1.0001


def by_segment(layout: PackedLayout, given: list[torch.Tensor]) -> torch.Tensor:
    return attention._by_segment(*given, layout, window=None, scaling=None, dropout=0.0)


def in_one_call(layout: PackedLayout, given: list[torch.Tensor]) -> torch.Tensor:
    kernel = varlen_kernel()
    assert kernel is not None
    return attention._in_one_call(kernel, *given, layout, window=None, scaling=None)


def exactly(layout: PackedLayout, given: list[torch.Tensor]) -> torch.Tensor:
    """Outputs (1, T, H, D) in double precision, through scores of all tokens with all."""
    segments = torch.arange(len(layout.segments)).repeat_interleave(torch.tensor(layout.lengths))
    places = torch.arange(layout.length)
    mask = ((segments[:, None] == segments) | (segments == 0)) & (places <= places[:, None])
    return scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True).transpose(1, 2)


WAYS: dict[str, Callable[..., torch.Tensor]] = {"segment by segment": by_segment, "a GPU's kernel": in_one_call}


@pytest.mark.parametrize("way", WAYS)
def test_a_prompts_gradients_are_about_as_exact_as_one_rounding_on_every_way(way, monkeypatch):
    """In bfloat16, for a group of 16, against double precision: root of the mean square, relative."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch([]))
    varlen_kernel.cache_clear()
    layout = group(prompt=64, length=64)
    generator = torch.Generator().manual_seed(0)
    halves = [
        torch.randn(1, heads, layout.length, 32, generator=generator).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    ]
    doubles = [tensor.detach().double().requires_grad_() for tensor in halves]
    # Responses agree in what they want of the prompt.
    weights = torch.rand(1, layout.length, 4, 32, generator=generator).bfloat16()
    (WAYS[way](layout, halves) * weights).sum().backward()
    (exactly(layout, doubles) * weights).sum().backward()
    varlen_kernel.cache_clear()
    for half, double in zip(halves[1:], doubles[1:], strict=True):
        mine, exact = half.grad[:, :, :64].double(), double.grad[:, :, :64]
        assert float((mine - exact).norm() / exact.norm()) < ONCE
