"""The kit of Qwen3-VL's mixtures: released names and layouts, the load-balancing loss."""

from pathlib import Path

import pytest
import torch
from helpers.passes import samples_of
from helpers.tables import table
from helpers.tiny_models import make_actor, pad
from safetensors.torch import load_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from lmm_r1.checkpoints.merging import write_checkpoint
from lmm_r1.generation.weight_sync import as_stored, stored_weights
from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.adapters import merged_state_dict

KIT = get_kit("qwen3_vl_moe")
# As the released 30B-A3B's config.json has them.
TEXT_CONFIG = table("lmm_kits/qwen3_vl_moe", "text_config")
VISION_CONFIG = table("lmm_kits/qwen3_vl_moe", "vision_config")
TOP_CONFIG = table("lmm_kits/qwen3_vl_moe", "top_config")
# Of one layer, in the files of the releases.
RELEASED_LAYER = {
    "input_layernorm.weight": (2048,),
    "mlp.experts.down_proj": (128, 768, 2048),
    "mlp.experts.gate_up_proj": (128, 2048, 1536),
    "mlp.gate.weight": (128, 2048),
    "post_attention_layernorm.weight": (2048,),
    "self_attn.k_norm.weight": (128,),
    "self_attn.k_proj.weight": (512, 2048),
    "self_attn.o_proj.weight": (2048, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.q_proj.weight": (4096, 2048),
    "self_attn.v_proj.weight": (512, 2048),
}


def load(folder: Path) -> Qwen3VLMoeForConditionalGeneration:
    return KIT.load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False)


def test_the_released_config_gives_the_released_names_and_shapes():
    config = Qwen3VLMoeConfig(**TOP_CONFIG, text_config=TEXT_CONFIG, vision_config=VISION_CONFIG)
    assert (config.text_config.num_experts, config.text_config.num_experts_per_tok) == (128, 8)
    config.text_config.num_hidden_layers, config.vision_config.depth = 1, 1
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(config)
    weights = dict(model.named_parameters())
    stored: dict[str, tuple[int, ...]] = {}
    for group in stored_weights(model, weights):
        tensors = as_stored(model, {name: weights[name] for name in group.names})
        stored |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    prefix = "model.language_model.layers.0."
    assert {name.removeprefix(prefix): shape for name, shape in stored.items() if prefix in name} == RELEASED_LAYER
    others = {name for name in stored if prefix not in name and "visual" not in name}
    language = "model.language_model."
    assert others == {"lm_head.weight", f"{language}embed_tokens.weight", f"{language}norm.weight"}
    tower = "model.visual."
    assert stored[f"{tower}deepstack_merger_list.2.linear_fc2.weight"] == (2048, 4608)
    assert stored[f"{tower}pos_embed.weight"] == (2304, 1152)


def test_trained_and_merged_models_are_written_in_the_released_layout(folder, tmp_path):
    actor = make_actor(folder, lora_rank=4)
    # As a run saves it, and as `lmm-r1 merge` does.
    actor.model.save_pretrained(tmp_path / "saved", state_dict=merged_state_dict(actor.model))
    processor = KIT.load_processor(str(folder), trust_remote_code=False)
    write_checkpoint(load(folder), kit=KIT, processor=processor, output=tmp_path / "merged", dtype=torch.float32)
    own, saved, merged = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved", tmp_path / "merged")
    )
    assert own.keys() == saved.keys() == merged.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(saved[name], tensor, atol=1e-6, rtol=0)
        assert torch.equal(merged[name], tensor)


def test_the_loss_is_that_of_transformers(folder):
    actor = make_actor(folder)
    actor.balance_experts()
    sequences, mask = pad([[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23]], side="right")
    with torch.no_grad():
        _, output = actor(samples_of(sequences, mask), return_output=True)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        given = {"attention_mask": mask, "position_ids": positions.expand(3, *positions.shape)}
        expected = actor.model(sequences, **given, output_router_logits=True, use_cache=False).aux_loss
    assert output.aux_loss.item() == pytest.approx(expected.item(), rel=1e-5)
