"""What the check at start-up catches, what it leaves as it was, and what it says; every kit is in tests/contracts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.tiny_models import flat_actor, make_actor
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lmm_r1.errors import UserError
from lmm_r1.models.actor import KitActor
from lmm_r1.models.packed.attention import PACKED_ATTENTION, PackedMask
from lmm_r1.models.packed.self_check import check_packing


@pytest.fixture
def actor(tiny_checkpoint) -> KitActor:
    return make_actor(tiny_checkpoint("llm"), packing_samples=True, share_prefix=True)


def test_the_model_runs_packed_and_alone_in_both_modes_without_gradients_and_stays_as_it_was(actor):
    layer = actor.model.model.layers[0]
    layer.train()
    runs = []
    actor.model.register_forward_hook(
        lambda module, inputs, given, output: runs.append(
            (
                given["input_ids"].shape[0],
                given["attention_mask"] is None,
                module.training,
                output.logits.requires_grad,
            )
        ),
        with_kwargs=True,
    )
    check_packing(actor)
    packed_and_three_samples = [(1, True), (1, False), (1, False), (1, False)]
    assert runs == [(*run, mode, False) for mode in (False, True) for run in packed_and_three_samples]
    assert actor.packing_samples is True
    assert [module.training for module in (actor.model, layer, actor.model.model.layers[1])] == [False, True, False]
    assert all(weight.grad is None for weight in actor.model.parameters())


@contextmanager
def another_mask() -> Iterator[None]:
    """Let masks be made as if nothing were packed."""
    ours = AttentionMaskInterface()[PACKED_ATTENTION]
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
    yield
    AttentionMaskInterface.register(PACKED_ATTENTION, ours)


def test_a_mask_that_knows_nothing_of_the_layout_is_caught(actor):
    with another_mask(), pytest.raises(UserError) as error:
        check_packing(actor)
    message = str(error.value)
    assert "qwen2 does not run on packed sequences here. In evaluation mode" in message
    assert "leave --ds.packing_samples out and give --train.no_shared_prefix_enable" in message
    assert actor.packing_samples is True


def positions_of(actor: KitActor, change: Any, *, mode: bool | None = None) -> None:
    """Change the positions of packed sequences, in training or evaluation mode alone where one is named."""

    def hook(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if kwargs["attention_mask"] is None and mode in (None, module.training):
            kwargs = {**kwargs, "position_ids": change(kwargs["position_ids"])}
        return args, kwargs

    actor.model.register_forward_pre_hook(hook, with_kwargs=True)


def test_positions_that_go_on_from_one_response_to_the_next_are_caught(actor):
    positions_of(actor, lambda position_ids: torch.arange(position_ids.shape[-1])[None])
    with pytest.raises(UserError, match="In evaluation mode"):
        check_packing(actor)


def test_what_goes_wrong_in_training_alone_is_caught(actor):
    positions_of(actor, lambda position_ids: position_ids * 2, mode=True)
    with pytest.raises(UserError, match="In training mode"):
        check_packing(actor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_half_precision_passes_and_mistakes_do_not(tiny_checkpoint, dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    actor = flat_actor(
        str(tiny_checkpoint("llm")),
        attn_implementation="sdpa",
        param_dtype=name,
        packing_samples=True,
        share_prefix=True,
    )
    check_packing(actor)
    with another_mask(), pytest.raises(UserError, match="less than 0.15;"):
        check_packing(actor)


def test_what_one_rank_sees_all_ranks_raise(actor, monkeypatch):
    # As on two ranks, of which the other one is off.
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    asked = []

    def all_reduce(off: torch.Tensor, *, op: dist.ReduceOp) -> None:
        asked.append(op)
        off.fill_(3.0)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(UserError, match="off by 3 standard deviations"):
        check_packing(actor)
    assert asked == [dist.ReduceOp.MAX]


def windowed(window: int) -> Any:
    """What a pass over a packed sequence is given in the place of the mask, were every layer to look back that far only."""
    ours = AttentionMaskInterface()[PACKED_ATTENTION]

    def mask(*args: Any, **kwargs: Any) -> Any:
        made = ours(*args, **kwargs)
        return replace(made, window=window) if isinstance(made, PackedMask) else made

    return mask


def test_a_window_that_packed_sequences_alone_have_shows_in_samples_that_are_longer(actor):
    ours = AttentionMaskInterface()[PACKED_ATTENTION]
    AttentionMaskInterface.register(PACKED_ATTENTION, windowed(64))
    try:
        # The smallest samples are within the window.
        check_packing(actor)
        with pytest.raises(UserError, match="does not run on packed sequences here"):
            check_packing(actor, longest=256)
    finally:
        AttentionMaskInterface.register(PACKED_ATTENTION, ours)


def test_what_is_off_at_the_start_of_long_responses_alone_is_caught(actor):
    def hook(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        # Logits of the 500 + 125 + 125 response tokens.
        if output.shape[1] == 750:
            output[:, 500] += 4e-2 * torch.linspace(0, 1, output.shape[-1])
        return output

    check_packing(actor, longest=1000)
    actor.model.lm_head.register_forward_hook(hook)
    with pytest.raises(UserError, match="does not run on packed sequences here"):
        check_packing(actor, longest=1000)
