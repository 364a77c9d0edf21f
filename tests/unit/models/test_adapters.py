"""LoRA on a tiny language model: which layers, what merging computes, what is refused, what is saved."""

from pathlib import Path

import pytest
import torch
from helpers.passes import logits_of
from helpers.tables import frozen
from helpers.tiny_models import make_actor
from peft import LoraConfig, PeftModel, inject_adapter_in_model

from lmm_r1.errors import UserError
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import (
    adapted_layers,
    adapters_off,
    compute_merged,
    merged_state_dict,
    merged_weight,
    save_adapter,
)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint) -> Path:
    return tiny_checkpoint("llm")


def adapted(folder: Path, **settings: object) -> KitActor:
    """An actor whose adapters already do something."""
    actor = make_actor(folder, **{"lora_rank": 2, "lora_alpha": 8} | settings)
    torch.manual_seed(0)
    for layer in adapted_layers(actor.model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    return actor


def two_layers() -> torch.nn.Sequential:
    """Linear layers of 2 to 2 and of 2 to 1; the first one has an adapter of rank 1 with a scale of 3."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False))
    inject_adapter_in_model(LoraConfig(r=1, lora_alpha=3, target_modules=["0"]), model)
    with torch.no_grad():
        model[0].base_layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model[0].base_layer.bias.copy_(torch.tensor([5.0, 6.0]))
        model[0].lora_A["default"].weight.copy_(torch.tensor([[1.0, -1.0]]))
        model[0].lora_B["default"].weight.copy_(torch.tensor([[2.0], [0.5]]))
        model[1].weight.copy_(torch.tensor([[7.0, 8.0]]))
    return model


def test_merged_weights_stand_under_the_bare_models_names_as_computed_by_hand():
    merged = merged_state_dict(two_layers())
    # 3 x [[2], [0.5]] x [[1, -1]] = [[6, -6], [1.5, -1.5]]
    assert {name: weight.tolist() for name, weight in merged.items()} == {
        "0.weight": [[7.0, -4.0], [4.5, 2.5]],
        "0.bias": [5.0, 6.0],
        "1.weight": [[7.0, 8.0]],
    }


def test_merging_changes_no_weight_however_often():
    model = two_layers()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    first = merged_state_dict(model)
    for _ in range(100):
        again = merged_state_dict(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())


def test_a_model_computes_without_its_adapters_and_with_them_again():
    model, given = two_layers(), torch.tensor([[1.0, 2.0]])
    wanted = [weight.requires_grad for weight in model.parameters()]
    # [1, 2] x [[1, 3], [2, 4]] + [5, 6] = [10, 17], then 7 x 10 + 8 x 17 = 206; the adapter adds 3 x -1 x [2, 0.5].
    with_adapters = 206.0 + 7 * -6 + 8 * -1.5
    assert model(given).item() == with_adapters
    with adapters_off(model):
        assert model(given).item() == 206.0
        assert [weight.requires_grad for weight in model.parameters()] == wanted
    assert model(given).item() == with_adapters
    with pytest.raises(ValueError, match="broken"), adapters_off(model):
        raise ValueError("broken")
    assert model(given).item() == with_adapters


def test_bf16_is_merged_in_fp32_and_rounded_once():
    layer = two_layers()[0]
    layer.scaling["default"] = 1.0
    weight = torch.tensor([[256.0]], dtype=torch.bfloat16)
    a = torch.tensor([[1.0], [2.0**-10]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    merged = merged_weight(layer, weight, a, b)
    # bf16 holds 256 and 258 and nothing between: 257.001 is nearer to 258. A product rounded to bf16 first is 1, and
    # 257 goes to 256.
    assert merged.dtype is torch.bfloat16
    assert merged.item() == 258.0


def test_in_bf16_gradients_are_those_of_the_weight_before_its_rounding():
    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 8))
        x = torch.randn(5, 24).bfloat16().to(dtype).requires_grad_()
        config = LoraConfig(r=2, target_modules=["0", "1"])
        inject_adapter_in_model(config, model)
        for layer in adapted_layers(model).values():
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
            compute_merged(layer)
        model.to(torch.bfloat16).to(dtype)
        model(x).pow(2).sum().backward()
        return [x.grad, *(weight.grad for weight in model.parameters() if weight.requires_grad)]

    for found, expected in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_named_targets_are_adapted_alone(folder):
    assert len(adapted_layers(make_actor(folder, lora_rank=2).model)) == 14, "seven layers in each of two blocks"
    by_name = adapted_layers(make_actor(folder, lora_rank=2, target_modules=("q_proj", "v_proj")).model)
    assert list(by_name) == [f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qv"]
    by_end = adapted_layers(make_actor(folder, lora_rank=2, target_modules=["layers.1.mlp.up_proj"]).model)
    assert list(by_end) == ["model.layers.1.mlp.up_proj"]


def test_adapters_alone_are_trained_and_start_without_effect(folder):
    bare, actor = make_actor(folder), make_actor(folder, lora_rank=2, lora_alpha=8)
    trained = {name for name, weight in actor.model.named_parameters() if weight.requires_grad}
    assert trained == {
        f"{layer}.lora_{factor}.default.weight" for layer in adapted_layers(actor.model) for factor in "AB"
    }
    assert {layer.scaling["default"] for layer in adapted_layers(actor.model).values()} == {4.0}
    sequences = torch.tensor([[7, 9, 11]])
    outputs = [logits_of(one, sequences, attention_mask=torch.ones_like(sequences)) for one in (bare, actor)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("settings", "message"), frozen("models/adapters", "settings_that_cannot_be_are_refused"))
def test_settings_that_cannot_be_are_refused(folder, settings, message):
    with pytest.raises(UserError) as refused:
        make_actor(folder, **{"lora_rank": 2} | settings)
    assert message in str(refused.value)


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}])
def test_the_saved_adapter_loads_on_top_of_the_original_model(folder, tmp_path, kind):
    actor = adapted(folder, target_modules=("q_proj", "down_proj"), **kind)
    save_adapter(actor.model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    again = make_actor(folder)
    assert PeftModel.from_pretrained(again.model, tmp_path).peft_config["default"].base_model_name_or_path == str(
        folder
    )
    sequences = torch.tensor([[7, 9, 11, 13]])
    with torch.no_grad():
        logits = [
            logits_of(one, sequences, attention_mask=torch.ones_like(sequences))
            for one in (actor, again, make_actor(folder))
        ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)
    assert (logits[0] - logits[2]).abs().max() > 1e-3
