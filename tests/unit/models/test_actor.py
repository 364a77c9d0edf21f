"""The actor's arithmetic on a tiny language model; what depends on the kit is in tests/contracts/test_kits.py."""

import sys
from types import ModuleType

import pytest
import torch
from helpers.passes import logits_of, next_log_probs, samples_of
from helpers.tiny_models import altered, flat_actor, make_actor, pad
from helpers.value_models import make_value_model

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapted_layers
from lmm_r1.models.loading import resolve_attention
from lmm_r1.models.output_layer import ban

ROWS = ([7, 9, 11, 13, 15], [8, 10, 12])


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    return tiny_checkpoint("llm")


@pytest.fixture(scope="module")
def actor(folder) -> KitActor:
    return make_actor(folder)


def expected_log_probs(actor: KitActor, ids: list[int], *, temperature: float = 1.0) -> list[float]:
    """log_softmax of the model's own logits, looked up token by token."""
    with torch.no_grad():
        logits = actor.model(torch.tensor([ids])).logits[0] / temperature
    table = torch.log_softmax(logits, dim=-1)
    return [table[position, token].item() for position, token in enumerate(ids[1:])]


def test_log_probs_are_those_of_the_next_tokens(actor):
    sequences, mask = pad(ROWS, side="right")
    with torch.no_grad():
        log_probs = next_log_probs(actor, sequences, attention_mask=mask)
    assert log_probs.shape == (2, 4)
    for index, ids in enumerate(ROWS):
        assert log_probs[index, : len(ids) - 1].tolist() == pytest.approx(expected_log_probs(actor, ids), abs=1e-5)


def test_an_action_mask_gives_log_probs_of_the_response_alone(actor):
    sequences, mask = pad(ROWS, side="right")
    action_mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    with torch.no_grad():
        log_probs = actor(samples_of(sequences, mask, action_mask))[:, 1:]
    first, second = (expected_log_probs(actor, ids) for ids in ROWS)
    assert log_probs[0].tolist() == pytest.approx([0.0, first[2], first[3]], abs=1e-5)
    assert log_probs[1].tolist() == pytest.approx([second[1], 0.0, 0.0], abs=1e-5)


def test_the_temperature_divides_the_logits(folder, actor):
    sequences, mask = pad(ROWS[:1], side="right")
    with torch.no_grad():
        warm = next_log_probs(make_actor(folder, temperature=2.0), sequences, attention_mask=mask)
    assert warm[0].tolist() == pytest.approx(expected_log_probs(actor, ROWS[0], temperature=2.0), abs=1e-5)


def test_banned_tokens_are_banned_before_the_temperature_as_the_engine_bans_them(folder):
    plain, banning = make_actor(folder), make_actor(folder, ban_media_tokens=True, temperature=2.0)
    assert banning.banned_token_ids.tolist() == [], "its tokenizer knows every id of this small vocabulary"
    banning.banned_token_ids = torch.tensor([3, 5])
    sequences, mask = pad(ROWS[:1], side="right")
    with torch.no_grad():
        logits = logits_of(banning, sequences, attention_mask=mask)
        expected = logits_of(plain, sequences, attention_mask=mask)
    expected[..., [3, 5]] -= 1e9
    torch.testing.assert_close(logits, expected / 2.0)


def test_the_entropy_is_that_of_the_distribution_of_each_next_token(actor):
    sequences, mask = pad(ROWS, side="right")
    with torch.no_grad():
        log_probs, output = actor(samples_of(sequences, mask), return_output=True, return_entropy=True)
        table = torch.log_softmax(logits_of(actor, sequences, attention_mask=mask)[0, 0], dim=-1)
    assert log_probs.shape == output.entropy.shape == (2, 4)
    assert output.entropy[0, 0].item() == pytest.approx(-(table.exp() * table).sum().item(), abs=1e-4)


def test_logits_are_fp32_whatever_the_weights_are(folder):
    actor = flat_actor(str(folder), attn_implementation="sdpa", param_dtype="bf16")
    sequences, mask = pad(ROWS, side="right")
    assert next(actor.parameters()).dtype is torch.bfloat16
    assert logits_of(actor, sequences, attention_mask=mask).dtype is torch.float32


def test_auto_takes_flash_attention_where_it_can_run_and_the_kit_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", ModuleType("flash_attn_2_cuda"))
    kit = get_kit("llm")
    assert resolve_attention("auto", kit=kit) == "flash_attention_2"
    assert resolve_attention("auto", kit=altered(kit, takes_flash_attention=False)) == "sdpa"


@pytest.mark.parametrize("temperature", [0.05, 1.0, 10.0])
def test_150_000_banned_tokens_have_no_probability_at_any_temperature_as_with_minus_infinity(temperature):
    logits = torch.randn(150_004, generator=torch.Generator().manual_seed(0))
    banned = torch.arange(4, 150_004)
    found = torch.log_softmax(ban(logits, banned) / temperature, dim=-1)
    in_engine = torch.log_softmax(logits.index_fill(0, banned, -torch.inf) / temperature, dim=-1)
    assert torch.equal(found[:4], in_engine[:4])
    assert (found.exp() == in_engine.exp()).all()
    assert found.isfinite().all(), "products with a probability of 0 are 0"


def frozen_names(actor) -> set[str]:
    return {name for name, weight in actor.model.named_parameters() if not weight.requires_grad}


def test_weights_are_frozen_by_the_beginnings_of_their_names(folder):
    prefixes = ("model.embed_tokens.", "model.layers.0.")
    for made in (make_actor(folder, freeze_prefix=prefixes), make_value_model(folder, freeze_prefix=prefixes)):
        every = {name for name, _ in made.model.named_parameters()}
        assert frozen_names(made) == {name for name in every if name.startswith(prefixes)}
        assert len(frozen_names(made)) > 5


def test_frozen_layers_get_no_adapters(folder):
    actor = make_actor(folder, lora_rank=2, freeze_prefix=("model.layers.0.",))
    assert {name.split(".")[2] for name in adapted_layers(actor.model)} == {"1"}
    with pytest.raises(UserError, match="--actor.freeze_prefix model.layers. .in SFT.*leaves no layer that"):
        make_actor(folder, lora_rank=2, freeze_prefix=("model.layers.",))


def test_a_prefix_of_no_name_or_of_all_names_is_refused(folder):
    with pytest.raises(UserError, match="--actor.freeze_prefix vision. .in SFT.*they begin with lm_head.weight."):
        make_actor(folder, freeze_prefix=("vision.",))
    with pytest.raises(UserError, match="every weight would be frozen; name fewer"):
        make_actor(folder, freeze_prefix=("model.", "lm_head."))
