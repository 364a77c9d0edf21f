"""Shares of a packed sequence: which tokens and targets are whose, what fills it up, and what cannot be shared."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen3_5TextConfig

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.packed import sequence_parallel
from lmm_r1.models.packed.layout import PackedLayout, PackedSegment
from lmm_r1.models.packed.packing import ModelSample, PackedSequence, pack_batch, stacked
from lmm_r1.models.packed.sequence_parallel import check_heads, share_of


def sequence(*, length: int, sources: list[int]) -> PackedSequence:
    return PackedSequence(
        token_ids=torch.zeros(1, length, dtype=torch.long),
        inputs={},
        layout=PackedLayout(segments=(PackedSegment(start=0, end=length),)),
        sources=torch.tensor(sources),
        target_ids=torch.tensor([10 * source for source in sources]),
        places=(torch.zeros(len(sources), dtype=torch.long), torch.tensor(sources)),
        shape=(1, length - 1),
        filled=False,
        filler=0,
    )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A group that pretends to have as many ranks as `size` says, of which this process is `rank`."""
    group = SimpleNamespace(size=2, rank=0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    return group


def test_a_share_has_the_targets_predicted_from_its_tokens_counted_from_its_start(ranks):
    whole = sequence(length=8, sources=[1, 3, 4, 4, 7])
    expected = [(slice(0, 4), [1, 3], [10, 30], [0, 1]), (slice(4, 8), [0, 0, 3], [40, 40, 70], [2, 3, 4])]
    for ranks.rank, (tokens, sources, target_ids, places) in enumerate(expected):
        share = share_of(whole, group=ranks)
        assert share.tokens == tokens
        assert share.sources.tolist() == sources
        assert share.target_ids.tolist() == target_ids
        assert share.places.tolist() == places


def test_a_share_without_targets_predicts_one_that_is_not_used(ranks, monkeypatch):
    monkeypatch.setattr(sequence_parallel, "all_reduce", lambda values, group: values.clone())
    share = share_of(sequence(length=8, sources=[4, 6]), group=ranks)
    assert (share.sources.tolist(), share.target_ids.tolist(), share.places.tolist()) == ([0], [0], [])
    unused = torch.tensor([5.0], requires_grad=True)
    gathered = share.gather(unused)
    gathered.sum().backward()
    assert gathered.tolist() == [0.0, 0.0]
    assert unused.grad.tolist() == [0.0]


def test_values_are_gathered_at_the_places_of_their_targets(ranks, monkeypatch):
    monkeypatch.setattr(sequence_parallel, "all_reduce", lambda values, group: 2 * values)
    ranks.rank = 1
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    gathered = share_of(sequence(length=8, sources=[1, 3, 4, 4, 7]), group=ranks).gather(values)
    # Two ranks with the same numbers would have summed to this.
    assert gathered.tolist() == [0, 0, 2, 4, 6]
    (gathered * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
    assert values.grad.tolist() == [6, 8, 10]


@pytest.mark.parametrize(("multiple_of", "filler"), [(1, 0), (2, 1), (4, 1), (7, 0), (5, 3)])
def test_a_sequence_is_filled_up_with_a_segment_of_its_own(multiple_of, filler):
    kit, config = get_kit("llm"), Qwen2Config(vocab_size=50)
    samples = [ModelSample.whole([11, 12, 13, 14]), ModelSample.whole([21, 22, 23])]
    wanted = stacked(samples, lambda sample: sample.loss_mask)
    packed = pack_batch(kit, config, samples, wanted=wanted, share_prefix=False, fill=False, multiple_of=multiple_of)
    assert packed.token_ids.tolist() == [[11, 12, 13, 14, 21, 22, 23, *[11] * filler]]
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, *range(filler)]]
    assert [segment.length for segment in packed.layout.segments] == [4, 3, *[filler] * bool(filler)]
    assert packed.layout.segments[-1].prefix is None
    assert packed.sources.tolist() == [0, 1, 2, 4, 5]


def test_ranks_that_do_not_divide_the_heads_are_refused_with_those_that_do():
    config = Qwen2Config(num_attention_heads=12, num_key_value_heads=2)
    check_heads(config, size=6, model="--actor.model_name_or_path m")
    with pytest.raises(UserError) as refused:
        check_heads(config, size=8, model="--actor.model_name_or_path m")
    assert str(refused.value) == (
        "--ds.ulysses_size 8: --actor.model_name_or_path m has 12 attention heads, which 8 GPUs cannot share equally; "
        "take one of 1, 2, 3, 4, 6, 12"
    )


def test_linear_attention_layers_are_refused_by_name_and_flag():
    config = Qwen3_5TextConfig(
        num_attention_heads=2, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    check_heads(config, size=1, model="--actor.model_name_or_path m")
    with pytest.raises(
        UserError, match="--ds.ulysses_size 2: --actor.model_name_or_path m has linear attention layers"
    ):
        check_heads(config, size=2, model="--actor.model_name_or_path m")
