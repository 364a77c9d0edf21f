"""Layers in 4 bits: what they compute, which they are, what a state dict of them holds, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.passes import logits_of
from helpers.tiny_models import make_actor
from safetensors import safe_open

from lmm_r1.checkpoints.merging import load_with_adapter, merge_adapter
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import (
    FrozenLinear4bit,
    adapted_layers,
    adapters_off,
    dequantized_tensors,
    merged_state_dict,
    packed_bytes,
    quantized_layers,
    rounded,
    save_adapter,
)

CPU = torch.device("cpu")
SEQUENCES = torch.tensor([[7, 9, 11, 13]])


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("llm")


def logits(actor: KitActor) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(actor, SEQUENCES, attention_mask=torch.ones_like(SEQUENCES))


def layer(rows: int = 8, columns: int = 64) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(columns, rows)


def test_a_weight_has_16_values_a_block_as_nf4_has_them():
    plain = layer()
    # Of NF4's values -1, -0.6961928, ..., 0.7229568, 1, the block's largest number is 1 or -1.
    with torch.no_grad():
        plain.weight[0] = torch.linspace(-2, 2, 64)
    values = FrozenLinear4bit.of(plain, device=CPU).dequantized()[0]
    assert len(values.unique()) <= 16
    # Scales are rounded to 8 bits.
    assert values.abs().max().item() == pytest.approx(2, rel=0.02)
    assert (values - plain.weight[0]).abs().max() < 2 * 0.16


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_computes_with_the_weight_that_it_stands_for(training):
    plain = layer()
    in_4bit = FrozenLinear4bit.of(plain, device=CPU).train(training)
    given = torch.randn(5, 64, requires_grad=training)
    expected = torch.nn.functional.linear(given, in_4bit.dequantized(), plain.bias)
    torch.testing.assert_close(in_4bit(given), expected, atol=1e-5, rtol=0)
    assert not any(weight.requires_grad for weight in in_4bit.parameters())
    assert in_4bit.weight.nbytes == 8 * 64 // 2
    torch.testing.assert_close(rounded(plain.weight.data, dtype=torch.float32), in_4bit.dequantized())


def test_its_state_dict_loads_into_a_layer_of_other_weights_and_stands_for_a_whole_weight():
    torch.manual_seed(1)
    saved, other = (FrozenLinear4bit.of(torch.nn.Linear(64, 8), device=CPU) for _ in range(2))
    state = saved.state_dict()
    assert not torch.equal(other.dequantized(), saved.dequantized())
    other.load_state_dict(state)
    assert torch.equal(other.dequantized(), saved.dequantized())
    given = torch.randn(2, 64)
    assert torch.equal(other(given), saved(given))
    whole = dequantized_tensors({f"a.{name}": value for name, value in state.items()} | {"b": given})
    assert whole.keys() == {"a.weight", "a.bias", "b"}
    assert torch.equal(whole["a.weight"], saved.dequantized())
    kept = sum(value.nbytes for name, value in state.items() if name.startswith("weight") and "map" not in name)
    # And a few bytes of JSON.
    assert 0 < kept - packed_bytes(8 * 64) < 300


def test_the_language_models_linear_layers_alone_are_in_4_bits_under_their_adapters(tiny_checkpoint):
    plain, actor = (make_actor(tiny_checkpoint("qwen2_5_vl"), lora_rank=4, load_in_4bit=on) for on in (False, True))
    found = quantized_layers(actor.model)
    assert [name.removesuffix(".base_layer") for name in found] == list(adapted_layers(plain.model))
    assert list(adapted_layers(actor.model)) == list(adapted_layers(plain.model))
    others = dict(plain.model.named_parameters())
    for name, weight in actor.model.named_parameters():
        in_4bit = any(name == f"{layer}.weight" for layer in found)
        assert weight.dtype is (torch.uint8 if in_4bit else torch.float32)
        assert weight.requires_grad == (".lora_" in name)
        if not in_4bit and ".lora_" not in name:
            assert torch.equal(weight, others[name])


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}])
def test_what_is_saved_of_adapters_in_4_bits_gives_the_trained_model_again(folder, tmp_path, kind):
    torch.manual_seed(0)
    actor = make_actor(folder, lora_rank=2, load_in_4bit=True, target_modules=("q_proj", "down_proj"), **kind)
    bare = make_actor(folder, load_in_4bit=True)
    for adapted in adapted_layers(actor.model).values():
        torch.nn.init.normal_(adapted.lora_B["default"].weight, std=0.02)
    trained, untrained = logits(actor), logits(bare)
    assert (trained - untrained).abs().max() > 1e-3
    assert (untrained - logits(make_actor(folder))).abs().max() > 1e-2, "4 bits would not have shown"
    with adapters_off(actor.model):
        torch.testing.assert_close(logits(actor), untrained, atol=1e-6, rtol=0)

    merged = merged_state_dict(actor.model)
    original = make_actor(folder)
    assert list(merged) == list(original.model.state_dict())
    original.model.load_state_dict(merged)
    torch.testing.assert_close(logits(original), trained, atol=1e-5, rtol=0)

    save_adapter(actor.model, tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata()["base_in_4bit"] == "float32"
    again = load_with_adapter(str(folder), tmp_path, dtype=torch.float32, trust_remote_code=False)
    merge_adapter(again)
    for name, weight in again.state_dict().items():
        torch.testing.assert_close(weight, merged[name], atol=1e-6, rtol=0)
