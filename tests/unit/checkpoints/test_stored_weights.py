"""Weights group by group as the checkpoint has them, against what transformers writes of the whole model."""

import pytest
import torch
from helpers.tables import table
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lmm_r1.generation.weight_sync import as_stored, stored_weights
from lmm_r1.lmm_kits import KITS, get_kit

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LANGUAGE_MODELS = table("checkpoints/stored_weights", "language_models")


def sent(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return all tensors, put together group by group, and check that none comes twice."""
    weights = dict(model.named_parameters())
    groups = stored_weights(model, weights)
    assert sorted(name for group in groups for name in group.names) == sorted(weights)
    found: dict[str, torch.Tensor] = {}
    for group in groups:
        tensors = as_stored(model, {name: weights[name].detach() for name in group.names})
        if group.stored_name is not None:
            assert list(tensors) == [group.stored_name]
            assert tensors[group.stored_name].data_ptr() == weights[group.names[0]].data_ptr(), "no copy"
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    return found


def check(model: PreTrainedModel, folder: object) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    saved, found = load_file(folder / "model.safetensors"), sent(model)
    # What is no parameter is never sent.
    assert saved.keys() - {name for name, _ in model.named_buffers()} == found.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in found.items())
    return found


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@pytest.mark.parametrize("loaded", [False, True])
def test_the_groups_make_up_the_checkpoint(name, loaded, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **LANGUAGE_MODELS[name]))
    if loaded:
        model.save_pretrained(tmp_path / "first")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    check(model, tmp_path / "saved")


def test_experts_that_are_one_tensor_here_are_single_ones_there(tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **SIZES, **LANGUAGE_MODELS["mixtral"])
    model = AutoModelForCausalLM.from_config(config)
    found = check(model, tmp_path)
    fused = model.model.layers[1].mlp.experts
    for expert in range(4):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}"
        # Gate and up projection lie one below the other, 48 rows each.
        assert torch.equal(found[f"{name}.w1.weight"], fused.gate_up_proj[expert, :48])
        assert torch.equal(found[f"{name}.w3.weight"], fused.gate_up_proj[expert, 48:])
        assert torch.equal(found[f"{name}.w2.weight"], fused.down_proj[expert])


@pytest.mark.parametrize("name", [name for name in KITS if name != "llm"])
def test_those_of_every_kit_make_up_its_checkpoint(name, tiny_checkpoint, tmp_path):
    model = get_kit(name).load_model(
        str(tiny_checkpoint(name)), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    check(model, tmp_path)
