"""Attention over a packed sequence on CPUs, against the definition of attention, token by token."""

import itertools

import pytest
import torch
from helpers.packed_batches import segments_of

from lmm_r1.models.packed import attention
from lmm_r1.models.packed.attention import attend_on_cpu, fits_cpu_kernel
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment

# A prompt with two responses, a sample by itself, and a prompt with one response behind it.
GROUPS = PackedLayout(segments=segments_of((5, None), (3, 0), (1, 0), (4, None), (2, None), (4, 4)))
# A prompt, two turns behind one another with two last ones, another branch from the prompt, and another tree.
TREES = PackedLayout(
    segments=segments_of((3, None), (2, 0), (4, 1), (1, 2), (3, 2), (2, 0), (2, None), (1, 6), (2, 7))
)
HEADS, WIDTH = 4, 8


def tensors(layout: PackedLayout, *, keys: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries (1, H, T, D), keys and values (1, K, T, D), as a model's projections give them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, layout.length, heads, WIDTH) for heads in (HEADS, keys, keys)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [tensor.transpose(1, 2).requires_grad_() for tensor in made]


def prefix_of(layout: PackedLayout, index: int) -> list[int]:
    """The segments that a segment goes on from, the first one first."""
    prefix = layout.segments[index].prefix
    return [] if prefix is None else [*prefix_of(layout, prefix), prefix]


def sees(layout: PackedLayout, query: int, key: int, *, window: int | None) -> bool:
    """Whether one token attends to another, as the layout's words say."""
    mine, theirs = (
        next(index for index, segment in enumerate(layout.segments) if segment.start <= token < segment.end)
        for token in (query, key)
    )
    segment = layout.segments[mine]
    prefix = prefix_of(layout, mine)
    if theirs in prefix:
        between = sum(layout.segments[part].length for part in prefix[prefix.index(theirs) + 1 :])
        distance = layout.segments[theirs].end - key + between + query - segment.start
    elif theirs == mine:
        blocks = layout.block_ids
        if blocks is not None and blocks[query] == blocks[key] >= 0:
            return True
        distance = query - key
    else:
        return False
    return distance >= 0 and (window is None or distance < window)


def by_definition(
    layout: PackedLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int | None = None
) -> torch.Tensor:
    """Outputs (1, T, H, D) through scores of every token with every other."""
    key, value = (tensor.repeat_interleave(HEADS // tensor.shape[1], dim=1) for tensor in (key, value))
    seen = torch.zeros(layout.length, layout.length, dtype=torch.bool)
    for mine, theirs in itertools.product(range(layout.length), repeat=2):
        seen[mine, theirs] = sees(layout, mine, theirs, window=window)
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def check(layout: PackedLayout, *, window: int | None = None, keys: int = 2) -> None:
    """Compare outputs and the gradients of all three inputs."""
    mine, theirs = tensors(layout, keys=keys), tensors(layout, keys=keys)
    output = attend_on_cpu(*mine, layout, window=window, scaling=0.3)
    expected = by_definition(layout, *theirs, window=window)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    for result in (output, expected):
        (result * weights).sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-12, rtol=0)


def test_two_keys_of_a_prompt_and_one_of_its_own_weigh_as_in_one_softmax():
    layout = PackedLayout(segments=segments_of((2, None), (1, 0)))
    query = torch.ones(1, 1, 3, 1)
    key = torch.log(torch.tensor([1.0, 2.0, 5.0])).view(1, 1, 3, 1)
    value = torch.tensor([8.0, 16.0, 24.0]).view(1, 1, 3, 1)
    output = attend_on_cpu(query, key, value, layout, window=None, scaling=1.0)
    # Weights 1 : 2 : 5 for the last token, 1 : 2 for the prompt's second.
    expected = [8.0, (8 + 2 * 16) / 3, (8 + 2 * 16 + 5 * 24) / 8]
    torch.testing.assert_close(output.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("keys", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_the_definition_whatever_heads_share_keys(keys):
    check(GROUPS, keys=keys)


@pytest.mark.parametrize("keys", [1, 4])
def test_so_they_are_where_prefixes_have_prefixes(keys):
    check(TREES, keys=keys)
    blocks = torch.full((20,), -1)
    blocks[1:3], blocks[6:8], blocks[16] = 0, 1, 2
    check(PackedLayout(segments=TREES.segments, block_ids=blocks), keys=keys)


def test_tokens_of_a_block_attend_in_both_directions_and_responses_to_all_of_it():
    blocks = torch.full((19,), -1)
    blocks[1:4], blocks[10:12] = 0, 1
    check(PackedLayout(segments=GROUPS.segments, block_ids=blocks))


def test_a_window_may_cut_samples_but_not_a_prompt_from_its_responses():
    layout = PackedLayout(segments=(*GROUPS.segments[:3], PackedSegment(start=9, end=19)))
    check(layout, window=8)
    query, _, value = tensors(layout)
    assert fits_cpu_kernel(query, value, layout, window=8, dropout=0.0)
    # The first response's last token is the eighth of its sequence.
    assert not fits_cpu_kernel(query, value, layout, window=7, dropout=0.0)


@pytest.mark.parametrize("layout", [GROUPS, TREES], ids=["groups", "trees"])
@pytest.mark.parametrize("window", [None, 7])
def test_packed_attention_gives_the_same_on_either_path(window, layout):
    query, key, value = tensors(layout)
    settings = {"window": window, "scaling": 0.3, "dropout": 0.0}
    output = attention._by_segment(query, key, value, layout, **settings)
    torch.testing.assert_close(output, by_definition(layout, query, key, value, window=window), atol=1e-12, rtol=0)


@pytest.mark.parametrize("longest", [1, 384], ids=["in bfloat16", "in single precision"])
def test_so_are_its_gradients_whatever_they_are_computed_in(longest, monkeypatch):
    monkeypatch.setattr(attention, "_SHORT", longest)
    halves = tensors(GROUPS, dtype=torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in halves]
    weights = torch.randn(1, GROUPS.length, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    (attend_on_cpu(*halves, GROUPS, window=None, scaling=0.3) * weights).sum().backward()
    (by_definition(GROUPS, *exact) * weights).sum().backward()
    for half, double in zip(halves, exact, strict=True):
        assert half.grad.dtype == torch.bfloat16
        # Of numbers up to 4, bfloat16 keeps eight bits.
        torch.testing.assert_close(half.grad.double(), double.grad, atol=2 * 4 * 2**-8, rtol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return attend_on_cpu(*inputs, GROUPS, window=None, scaling=0.3)

    plain, checkpointed = tensors(GROUPS), tensors(GROUPS)
    run(*plain).square().sum().backward()
    torch.utils.checkpoint.checkpoint(run, *checkpointed, use_reentrant=reentrant).square().sum().backward()
    for one, other in zip(checkpointed, plain, strict=True):
        assert torch.equal(one.grad, other.grad)
