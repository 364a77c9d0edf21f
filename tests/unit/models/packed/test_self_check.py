"""What the check at start-up catches, what it leaves as it was, and what it says; every kit is in tests/contracts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.tiny_models import flat_actor, make_actor
from helpers.value_models import make_value_model
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lmm_r1.errors import UserError
from lmm_r1.models.actor import KitActor
from lmm_r1.models.packed import self_check as check_samples
from lmm_r1.models.packed.attention import PACKED_ATTENTION, PackedMask
from lmm_r1.models.packed.self_check import check_packing


@pytest.fixture
def actor(tiny_checkpoint) -> KitActor:
    return make_actor(tiny_checkpoint("llm"), packing_samples=True, share_prefix=True)


def test_a_model_that_does_not_pack_is_not_run(tiny_checkpoint):
    actor = make_actor(tiny_checkpoint("llm"))
    actor.model.register_forward_pre_hook(lambda module, inputs: pytest.fail("the model ran"))
    check_packing(actor)


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
    twice = (1, True, False, False)
    assert runs == [twice] + [(*run, mode, False) for mode in (False, True) for run in packed_and_three_samples]
    assert actor.packing_samples is True
    assert [module.training for module in (actor.model, layer, actor.model.model.layers[1])] == [False, True, False]
    assert all(weight.grad is None for weight in actor.model.parameters())


def test_dropout_is_off_while_it_runs_and_on_again_afterwards(tiny_checkpoint):
    actor = make_actor(tiny_checkpoint("llm"), packing_samples=True, share_prefix=True, lora_rank=2, lora_dropout=0.5)
    attention = actor.model.model.layers[0].self_attn
    attention.attention_dropout = 0.25
    check_packing(actor)
    assert attention.attention_dropout == 0.25
    assert attention.q_proj.lora_dropout["default"].p == 0.5
    assert attention.q_proj.lora_dropout["default"].training is False


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


def test_without_shared_prefixes_the_message_names_no_flag_for_them(tiny_checkpoint):
    actor = make_actor(tiny_checkpoint("llm"), packing_samples=True)
    positions_of(actor, lambda position_ids: torch.zeros_like(position_ids))
    with pytest.raises(UserError, match="leave --ds.packing_samples out$"):
        check_packing(actor)


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


def test_what_is_no_number_is_caught(actor):
    actor.model.lm_head.register_forward_hook(
        lambda module, inputs, output: output * torch.nan if len(output[0]) == 13 else output
    )
    with pytest.raises(UserError, match="off by inf standard deviations"):
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
    # Of the repeated forward, and of the packed sequence against the samples.
    assert asked == [dist.ReduceOp.MAX] * 2


def test_a_critic_is_checked_by_its_values(tiny_checkpoint):
    critic = make_value_model(tiny_checkpoint("llm"), packing_samples=True, share_prefix=True)
    check_packing(critic)
    with another_mask(), pytest.raises(UserError, match="does not run on packed sequences here"):
        check_packing(critic)


def test_a_model_within_an_engine_is_run_through_it(actor):
    calls = []

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(actor.packing_samples)
        return actor(*args, **kwargs)

    run.device = torch.device("cpu")
    check_packing(actor, run=run)
    assert calls == [True] + [True, False, False, False] * 2


def test_ids_that_mean_something_to_the_model_are_not_drawn():
    text = SimpleNamespace(vocab_size=8)
    config = SimpleNamespace(
        get_text_config=lambda: text,
        to_dict=lambda: {"image_token_id": 1, "vision": {"end": [2, {"deep": 3}], "scale": 0.5, "on": True}, "eos": 5},
    )
    draw = check_samples.text_ids(config, banned=[6])
    drawn = draw(200)
    assert set(drawn) == {0, 4, 7}
    assert drawn == check_samples.text_ids(config, banned=[6])(200), "ranks must draw the same"
    assert draw(200) != drawn


def lengths_of(model: Any, *, longest: int) -> list[int]:
    return [
        len(sample.prompt) + len(sample.response) for sample in check_samples.check_samples(model, longest=longest)
    ]


def test_samples_are_as_long_as_the_runs(actor):
    # Prompts of 500 and 125 tokens, responses of 500, 125 and 125.
    assert lengths_of(actor, longest=1000) == [1000, 250, 625]
    assert lengths_of(actor, longest=0) == [10, 9, 7]


def test_a_sample_holds_several_images_where_they_fit(tiny_checkpoint):
    model = make_actor(tiny_checkpoint("qwen2_5_vl"), packing_samples=True, share_prefix=True)
    image = model.model_config.image_token_id
    for longest, images in ((0, 1), (40, 1), (60, 2), (1000, 2)):
        first, other, second = check_samples.check_samples(model, longest=longest)
        assert first.prompt.count(image) == len(first.media["image_grid_thw"]) == images
        assert (first.prompt, first.media) == (second.prompt, second.media)
        assert (other.prompt.count(image), other.media) == (0, None)
    check_packing(model, longest=200)


def test_the_check_takes_what_fits_into_the_memory_that_is_free(actor, monkeypatch):
    vocabulary = actor.model_config.vocab_size
    needed = lambda length: length * (10 * vocabulary + 64 * 4 * 64 + 5 * length)  # noqa: E731
    for free, length in ((needed(800) * 4, 800), (needed(800) * 4 - 4, 400), (needed(200) * 4, 200)):
        monkeypatch.setattr(check_samples, "_free_memory", lambda free=free: free)
        assert check_samples.longest_that_fits(actor, tokens=800) == length


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


def test_a_first_forward_that_differs_from_its_repetition_is_told(actor, caplog):
    check_packing(actor)
    assert not caplog.records
    forwards = []

    def hook(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        forwards.append(output)
        return output + 4e-4 * torch.linspace(0, 1, output.shape[-1]) if len(forwards) == 1 else output

    actor.model.model.norm.register_forward_hook(hook)
    check_packing(actor)
    (record,) = caplog.records
    assert "the first forward is off by" in record.getMessage()
