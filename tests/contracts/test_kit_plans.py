"""What a plan says of a pass is what the same pass holds when it is computed, for every kit."""

from functools import partial
from typing import Any

import pytest
from helpers.tiny_models import MAX_LEN, flat_actor, flat_settings, flat_value_model

from lmm_r1.lmm_kits import KITS, Checkpoint
from lmm_r1.models.adapters import adapted_layers, quantized_layers
from lmm_r1.tools.planning import pass_memory
from lmm_r1.tools.planning.pass_memory import (
    EmptyModel,
    ModelSettings,
    ModelSize,
    Unpredictable,
    empty_model,
    ordinary_token,
    sample_of,
)

# Sends tokens to experts by what their values are: it can only be computed.
BY_VALUES = frozenset({"aria"})
SETTINGS: dict[str, Any] = {
    "attn_implementation": "sdpa",
    "param_dtype": "fp32",
    "packing_samples": True,
    "share_prefix": True,
    "max_len": MAX_LEN,
}


@pytest.fixture(autouse=True)
def small_models_have_no_memory_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_memory, "SMALL", 0)


def empty(folder: str, role: str, *, checkpointing: bool = False, **settings: Any) -> EmptyModel:
    load, _ = flat_settings(SETTINGS | settings)
    return empty_model(ModelSettings(path=folder, role=role, load=load, checkpointing=checkpointing))


def held(folder: str, *, role: str, checkpointing: bool, **settings: Any) -> tuple[int, int]:
    """Return the bytes of a pass over two samples with an image, as planned and as computed."""
    settings = SETTINGS | settings
    planned = empty(folder, role, checkpointing=checkpointing, **settings)
    build = flat_actor if role == "policy" else partial(flat_value_model, kind="critic", value_head_prefix="score")
    actor = build(folder, **settings)
    assert ModelSize.of(actor) == planned.size
    if checkpointing:
        actor.gradient_checkpointing_enable({"use_reentrant": False})
    real = EmptyModel(role=role, actor=actor, size=planned.size)
    checkpoint = Checkpoint(folder)
    kit, ordinary = checkpoint.kit, ordinary_token(checkpoint)
    ids, media = kit.filler_media(checkpoint.config) if kit.takes_images else ([], None)
    images = None if media is None else kit.merge_media([media] * 2)
    prompt = [*[ordinary] * 20, *ids * 2]
    batch = [sample_of(prompt, [ordinary] * length, media=images) for length in (30, 50)]
    entropy = role == "policy"
    assert all(weight.grad is None for weight in planned.actor.parameters())
    return planned.pass_bytes(batch, entropy=entropy), real.pass_bytes(batch, entropy=entropy)


@pytest.mark.parametrize("name", sorted(KITS))
def test_a_planned_pass_holds_what_a_computed_one_does(name, tiny_checkpoint):
    folder = str(tiny_checkpoint(name))
    for role, checkpointing in (("policy", False), ("critic", True)):
        if name in BY_VALUES:
            with pytest.raises(Unpredictable):
                held(folder, role=role, checkpointing=checkpointing)
            continue
        planned, computed = held(folder, role=role, checkpointing=checkpointing)
        assert planned == computed > 0


@pytest.mark.full
def test_adapters_a_frozen_tower_and_half_precision_are_planned_as_they_are_computed(tiny_checkpoint):
    folder = str(tiny_checkpoint("qwen2_5_vl"))
    whole = ModelSize.of(empty(folder, "policy").actor)
    half_lora = {"lora_rank": 4, "param_dtype": "bf16"}
    for settings in ({"lora_rank": 4}, half_lora, {"freeze_visual_encoder": True}, {"param_dtype": "bf16"}):
        planned, computed = held(folder, role="policy", checkpointing=True, **settings)
        assert planned == computed
    size = ModelSize.of(empty(folder, "policy", lora_rank=4).actor)
    assert size.trained < whole.trained / 4
    half = empty(folder, "policy", param_dtype="bf16").size
    assert half.weight_bytes == whole.weight_bytes // 2
    assert half.merging_bytes == 0
    adapted = empty(folder, "policy", **half_lora)
    largest = max(layer.get_base_layer().weight.numel() for layer in adapted_layers(adapted.actor).values())
    # In fp32, and then rounded to bf16.
    assert adapted.size.merging_bytes == 6 * largest > 0


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_model_in_4_bits_is_planned_with_its_scales_and_one_whole_layer(tiny_checkpoint, role):
    folder, settings = str(tiny_checkpoint("qwen2_5_vl")), SETTINGS | {"lora_rank": 4}
    model = empty(folder, role, lora_rank=4)
    whole, planned = model.size, model.size_in_4bit
    build = flat_actor if role == "policy" else partial(flat_value_model, kind="critic", value_head_prefix="score")
    actor = build(folder, **settings, load_in_4bit=True)
    state = actor.model.state_dict().items()
    scales = sum(value.nbytes for name, value in state if name.endswith(("weight.absmax", "weight.nested_absmax")))
    largest = max(layer.dequantized().nbytes for layer in quantized_layers(actor.model).values())
    assert planned.weight_bytes == ModelSize.of(actor).weight_bytes + scales + largest
    assert planned.weight_bytes < whole.weight_bytes == planned.read_bytes
    assert planned.trained == whole.trained
