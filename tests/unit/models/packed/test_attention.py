"""Attention over packed sequences against plain attention with a mask worked out token by token; what refuses them."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers.packed_batches import segments_of
from helpers.tables import table
from helpers.varlen_kernels import Calls, of_torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lmm_r1.models.image_features import WINDOW_ATTENTION
from lmm_r1.models.packed import attention
from lmm_r1.models.packed.attention import PACKED_ATTENTION, packed_as, packing_refusal, use_packed_attention
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment, varlen_kernel

HEADS, GROUPS, WIDTH = 4, 2, 8
# Two groups, the first with two responses and the second with one, and a sample by itself between them.
SEGMENTS = segments_of((4, None), (3, 0), (1, 0), (5, None), (2, None), (3, 4))
# A prompt, two turns behind one another with two last ones, another branch from the prompt, and a sample by itself.
TREES = segments_of((3, None), (2, 0), (4, 1), (1, 2), (3, 2), (2, 0), (3, None))
# In the first prompt, across all of the second, and in a response.
BLOCKS = torch.tensor([-1, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1, -1, -1, 2, 2, -1, -1, -1])
LAYOUTS = {
    "samples by themselves": PackedLayout(segments=segments_of((11, None), (7, None))),
    "shared prefixes": PackedLayout(segments=SEGMENTS),
    "runs that attend in both directions": PackedLayout(segments=SEGMENTS, block_ids=BLOCKS),
    "trees": PackedLayout(segments=TREES),
    "trees with such runs": PackedLayout(segments=TREES, block_ids=BLOCKS),
}
WINDOWS = [None, 3, 6]
MODULE = SimpleNamespace(training=False, is_causal=True)


def sees(layout: PackedLayout, query: int, key: int, *, window: int | None) -> bool:
    """Say token by token what the layout means."""

    def segment_of(token: int) -> PackedSegment:
        return next(segment for segment in layout.segments if segment.start <= token < segment.end)

    def prefix_of(segment: PackedSegment) -> list[PackedSegment]:
        if segment.prefix is None:
            return []
        prefix = layout.segments[segment.prefix]
        return [*prefix_of(prefix), prefix]

    def position(token: int) -> int:
        segment = segment_of(token)
        return sum(part.length for part in prefix_of(segment)) + token - segment.start

    mine, other = segment_of(query), segment_of(key)
    if other is not mine and other not in prefix_of(mine):
        return False
    if window is not None and position(query) - position(key) >= window:
        return False
    if position(key) <= position(query):
        return True
    blocks = layout.block_ids
    return blocks is not None and mine is other and blocks[query] >= 0 and bool(blocks[query] == blocks[key])


def inputs(layout: PackedLayout, *, grouped: bool, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = [HEADS, GROUPS if grouped else HEADS, GROUPS if grouped else HEADS]
    return [
        torch.randn(1, count, layout.length, WIDTH, generator=generator, dtype=dtype).requires_grad_()
        for count in heads
    ]


def expected(given: list[torch.Tensor], layout: PackedLayout, *, window: int | None, scaling: float) -> torch.Tensor:
    """Return softmax(q k * scaling) v over the tokens that each one sees, (1, T, H, D)."""
    query, key, value = given
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    tokens = range(layout.length)
    mask = torch.tensor([[sees(layout, q, k, window=window) for k in tokens] for q in tokens])
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def attend(given: list[torch.Tensor], layout: PackedLayout, *, window: int | None, scaling: float) -> torch.Tensor:
    """Return what the registered function does with the mask that the registered mask function gives."""
    with packed_as(layout):
        mask = attention._mask(batch_size=1, local_size=window)
    output, weights = attention._attention(MODULE, *given, mask, scaling=scaling)
    assert weights is None
    return output


def check(output: torch.Tensor, given: list[torch.Tensor], layout: PackedLayout, *, window: int | None) -> None:
    """Compare output and gradients with plain attention in double precision, of the same numbers."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((output * weights).sum(), given)
    doubles = [tensor.detach().double().requires_grad_() for tensor in given]
    theirs = expected(doubles, layout, window=window, scaling=0.3)
    torch.testing.assert_close(output.double(), theirs, atol=1e-6, rtol=0)
    for mine, other in zip(gradients, torch.autograd.grad((theirs * weights).sum(), doubles), strict=True):
        torch.testing.assert_close(mine.double(), other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_sequence_attends_as_its_layout_says_on_a_cpu(kind, window, grouped):
    given = inputs(LAYOUTS[kind], grouped=grouped)
    check(attend(given, LAYOUTS[kind], window=window, scaling=0.3), given, LAYOUTS[kind], window=window)


def test_two_keys_of_a_prompt_and_one_of_its_own_weigh_as_in_one_softmax():
    layout = PackedLayout(segments=segments_of((2, None), (1, 0)))
    query = torch.ones(1, 1, 3, 1)
    key = torch.log(torch.tensor([1.0, 2.0, 5.0])).view(1, 1, 3, 1)
    value = torch.tensor([8.0, 16.0, 24.0]).view(1, 1, 3, 1)
    output = attend([query, key, value], layout, window=None, scaling=1.0)
    # Weights 1 : 2 : 5 for the last token, 1 : 2 for the prompt's second.
    expected = [8.0, (8 + 2 * 16) / 3, (8 + 2 * 16 + 5 * 24) / 8]
    torch.testing.assert_close(output.flatten(), torch.tensor(expected))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let packed attention take the ways of GPUs, in single precision."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    varlen_kernel.cache_clear()

    monkeypatch.setattr(attention, "kernel_for", lambda *given, **settings: varlen_kernel())
    monkeypatch.setattr(attention, "fits_block_kernel", lambda query, key, *, dropout: True)
    monkeypatch.setattr(attention, "_kernel", lambda: flex_attention)
    # PyTorch's reference has a backward pass on CPUs, too.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *given: None)
    yield
    varlen_kernel.cache_clear()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_so_it_does_in_one_call_on_a_gpu(kind, window, monkeypatch, on_gpu):
    calls: Calls = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch(calls))
    monkeypatch.setattr(attention, "_by_segment", None)
    given = inputs(LAYOUTS[kind], grouped=True)
    check(attend(given, LAYOUTS[kind], window=window, scaling=0.3), given, LAYOUTS[kind], window=window)
    # The kernel for all layouts takes those with runs.
    assert len(calls) == (0 if any(LAYOUTS[kind].has_block) else 1)


def test_outside_of_a_packed_sequence_the_mask_and_the_attention_are_those_of_sdpa():
    arguments = {
        "batch_size": 2,
        "q_length": 4,
        "kv_length": 4,
        "attention_mask": torch.tensor([[True, True, True, False], [True] * 4]),
    }
    mask = attention._mask(**arguments)
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    query, key, value = torch.randn(3, 2, HEADS, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    mine, _ = attention._attention(MODULE, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(MODULE, query, key, value, mask, scaling=0.3)
    assert torch.equal(mine, theirs)


SMALL = table("models/packed/attention", "small")
REFUSED = {
    "caps its attention scores": Gemma2Config(**SMALL, attn_logit_softcapping=50.0),
    "attends to sinks": GptOssConfig(
        **SMALL, num_local_experts=2, layer_types=["full_attention", "sliding_attention"]
    ),
    "attends in chunks of tokens": Llama4TextConfig(
        **SMALL, intermediate_size_mlp=16, num_local_experts=1, attention_chunk_size=8
    ),
    "has layers of another kind than attention (conv)": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "has no attention that transformers can replace": BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2),
}


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_whose_attention_is_more_than_a_mask_is_refused_with_the_reason(why):
    model = model_of(REFUSED[why])
    assert packing_refusal(model) == f"{type(model).__name__} {why}"


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SMALL), Gemma2Config(**SMALL, attn_logit_softcapping=None, sliding_window=4)]
)
def test_plain_and_sliding_attention_is_taken(config):
    model = model_of(config)
    assert packing_refusal(model) is None
    use_packed_attention(model)
    assert model.config._attn_implementation == PACKED_ATTENTION


def test_of_a_model_with_towers_the_language_models_attention_alone_is_replaced(tiny_checkpoint):
    from helpers.tiny_models import make_actor

    model = make_actor(tiny_checkpoint("qwen2_5_vl"), packing_samples=True).model
    assert model.config.text_config._attn_implementation == PACKED_ATTENTION
    assert model.config.vision_config._attn_implementation == WINDOW_ATTENTION
    other = make_actor(tiny_checkpoint("gemma3"), packing_samples=True).model
    assert other.config.vision_config._attn_implementation == "sdpa"
