"""The kit of GLM-4.5V and GLM-4.6V: released names, shapes and templates, both processors, the routers' bias and their loss."""

from pathlib import Path

import pytest
import torch
from helpers.conversations import clip, message
from helpers.passes import samples_of
from helpers.tables import table
from helpers.tiny_models import encode, make_actor, pad
from safetensors.torch import load_file
from transformers import (
    Glm4vImageProcessor,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm4vProcessor,
    Glm4vVideoProcessor,
)

from lmm_r1.checkpoints.merging import write_checkpoint
from lmm_r1.generation.weight_sync import as_stored, stored_weights
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.adapters import merged_state_dict

KIT = get_kit("glm4v_moe")
# As the config.json of GLM-4.5V has them.
TEXT_CONFIG = table("lmm_kits/glm4v_moe", "text_config")
VISION_CONFIG = table("lmm_kits/glm4v_moe", "vision_config")
TOP_CONFIG = table("lmm_kits/glm4v_moe", "top_config")
# In the files of the release, of the language model's layers: of all, of the first one, of the others.
OF_ALL = {
    "input_layernorm.weight": (4096,),
    "post_attention_layernorm.weight": (4096,),
    "self_attn.k_proj.bias": (1024,),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 12288),
    "self_attn.q_proj.bias": (12288,),
    "self_attn.q_proj.weight": (12288, 4096),
    "self_attn.v_proj.bias": (1024,),
    "self_attn.v_proj.weight": (1024, 4096),
}
OF_FIRST = {
    "mlp.down_proj.weight": (4096, 10944),
    "mlp.gate_proj.weight": (10944, 4096),
    "mlp.up_proj.weight": (10944, 4096),
}
OF_EXPERTS = {
    "mlp.gate.e_score_correction_bias": (128,),
    "mlp.gate.weight": (128, 4096),
    **{
        f"mlp.{expert}.{name}_proj.weight": (4096, 1408) if name == "down" else (1408, 4096)
        for expert in ("shared_experts", *(f"experts.{number}" for number in range(128)))
        for name in ("down", "gate", "up")
    },
}
LAYERS, TOWER_LAYERS = 46, 24
TENSORS, NUMBERS = 18_106, 107_710_933_120  # of the whole release
BIAS = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Glm4vMoeForConditionalGeneration:
    return KIT.load_model(str(folder), dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)


def released_model() -> Glm4vMoeForConditionalGeneration:
    """The release without its weights, of its first two layers and the tower's first."""
    config = Glm4vMoeConfig(**TOP_CONFIG, text_config=dict(TEXT_CONFIG), vision_config=dict(VISION_CONFIG))
    config.text_config.num_hidden_layers, config.vision_config.depth = 2, 1
    with torch.device("meta"):
        return Glm4vMoeForConditionalGeneration(config)


def stored_shapes(model: Glm4vMoeForConditionalGeneration) -> dict[str, tuple[int, ...]]:
    weights = model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for group in stored_weights(model, weights):
        tensors |= as_stored(model, {name: weights[name] for name in group.names})
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_the_released_config_gives_the_released_names_and_shapes():
    model = released_model()
    # Half of a head's 128 dimensions turns.
    assert model.model.language_model.rotary_emb.inv_freq.shape == (32,)
    shapes = stored_shapes(model)
    parts = {
        "model.language_model.layers.0.": OF_ALL | OF_FIRST,
        "model.language_model.layers.1.": OF_ALL | OF_EXPERTS,
    }
    for prefix, expected in parts.items():
        found = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        assert found == expected
    counts = dict.fromkeys(shapes, 1)
    counts |= {name: LAYERS - 1 for name in shapes if ".layers.1." in name}
    counts |= {name: TOWER_LAYERS for name in shapes if ".blocks.0." in name}
    assert sum(counts.values()) == TENSORS
    assert sum(counts[name] * torch.Size(shape).numel() for name, shape in shapes.items()) == NUMBERS


def test_trained_and_merged_models_are_written_under_the_released_names_with_the_bias_as_it_was(
    folder, processor, tmp_path
):
    actor = make_actor(folder, lora_rank=4, param_dtype="bf16")
    # As a run saves it, and as `lmm-r1 merge` does.
    actor.model.save_pretrained(tmp_path / "saved", state_dict=merged_state_dict(actor.model))
    write_checkpoint(load(folder), kit=KIT, processor=processor, output=tmp_path / "merged", dtype=torch.bfloat16)
    own, saved, merged = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved", tmp_path / "merged")
    )
    assert own.keys() == saved.keys() == merged.keys()
    for written in (saved, merged):
        assert torch.equal(written[BIAS], own[BIAS])
        assert {name for name, tensor in written.items() if tensor.dtype != torch.bfloat16} == {BIAS}
        assert all(torch.equal(tensor, own[name].to(tensor.dtype)) for name, tensor in written.items())
    assert not torch.equal(own[BIAS], own[BIAS].bfloat16().float()), "a bias that bf16 would change"


def test_the_loss_counts_the_experts_that_the_router_has_chosen(folder):
    actor = make_actor(folder)
    actor.balance_experts()
    sequences, mask = pad([[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23]], side="right")
    seen: list[tuple[torch.Tensor, ...]] = []
    gate = actor.model.model.language_model.layers[1].mlp.gate
    gate.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        _, output = actor(samples_of(sequences, mask), return_output=True)
    # The rows behind those two keep an image in the pass.
    ((logits, _, choices),) = seen
    real = torch.zeros(len(logits), dtype=torch.bool)
    real[: mask.numel()] = mask.flatten().bool()
    scores = logits[real].sigmoid()
    probabilities = (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)
    shares = torch.bincount(choices[real].flatten(), minlength=6) / int(real.sum())
    assert int(shares.sum().round()) == 2
    assert output.aux_loss.item() == pytest.approx(6 * float(probabilities @ shares), rel=1e-5)
    highest = scores.topk(2, dim=1).indices.sort(dim=1).values
    assert not torch.equal(highest, choices[real].sort(dim=1).values), "bias and groups choose others than the scores"


def test_the_seconds_of_a_video_are_written_as_the_checkpoints_processor_writes_them(processor):
    first = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(size=processor.image_processor.size),
        tokenizer=processor.tokenizer,
        video_processor=Glm4vVideoProcessor(size=processor.video_processor.size),
        chat_template=processor.chat_template,
    )
    # Two frames a step; at 0.8 frames a second a step lasts two and a half.
    watched = [message("user", clip(5, 112, 56, fps=0.8))]
    image = f"<|begin_of_image|>{'<|image|>' * 8}<|end_of_image|>"
    for own, times in ((processor, ("0.0 seconds", "2.5 seconds", "5.0 seconds")), (first, ("0", "2", "5"))):
        text = own.tokenizer.decode(encode(KIT, own, watched).token_ids)
        steps = "".join(f"{image}{time}" for time in times)
        assert f"<|begin_of_video|>{steps}<|end_of_video|>" in text
