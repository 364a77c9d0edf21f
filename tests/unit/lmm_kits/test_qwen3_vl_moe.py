"""The kit of Qwen3-VL's mixtures: released names and layouts, the load-balancing loss."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import largest_difference, running_engine, sampled
from helpers.passes import samples_of
from helpers.tables import table
from helpers.tiny_models import encode, make_actor, pad
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose

from lmm_r1.checkpoints.merging import write_checkpoint
from lmm_r1.generation.weight_sync import as_stored, stored_weights
from lmm_r1.lmm_kits import EncodedPrompt, get_kit
from lmm_r1.lmm_kits.qwen_vl.engine_model import released
from lmm_r1.lmm_kits.qwen_vl.qwen3 import is_released
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


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[EncodedPrompt]:
    processor = KIT.load_processor(str(folder), trust_remote_code=False)
    texts = ([picture(84, 56), "Which digit is this?"], ["What is 12 + 34?"])
    return [encode(KIT, processor, [message("user", *parts)]) for parts in texts]


def load(folder: Path) -> Qwen3VLMoeForConditionalGeneration:
    return KIT.load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False)


def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with its experts' the other way round."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


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


def test_what_transformers_converts_are_these_tensors_alone_which_it_does_not_turn_back(folder, tmp_path):
    table = _build_checkpoint_conversion_mapping()["qwen3_vl_moe"]
    turns = {tuple(one.source_patterns): one.operations for one in table}
    assert set(turns) == {("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",)}
    assert all(type(operation) is Transpose for (operation,) in turns.values())
    # As it writes what it has read by its own table.
    model = load(folder)
    model._weight_conversions = table
    model.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    theirs, ours, own = (
        load_file(path / "model.safetensors") for path in (tmp_path / "theirs", tmp_path / "ours", folder)
    )
    gate_up, down = (f"model.language_model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    # Four experts of 96 in a model of 64.
    assert (own[gate_up].shape, own[down].shape) == ((4, 64, 192), (4, 96, 64))
    assert (theirs[gate_up].shape, theirs[down].shape) == ((4, 192, 64), (4, 64, 96)), "transformers turns them back"
    assert own.keys() == ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in own.items())
    assert all(torch.equal(turned(theirs)[name], tensor) for name, tensor in own.items())


def test_transformers_own_table_reads_what_is_written(folder, tmp_path):
    from transformers import conversion_mapping

    ours = load(folder).state_dict()
    registered = conversion_mapping.get_checkpoint_conversion_mapping("qwen3_vl_moe")
    table = _build_checkpoint_conversion_mapping()["qwen3_vl_moe"]
    conversion_mapping.register_checkpoint_conversion_mapping("qwen3_vl_moe", table, overwrite=True)
    try:
        theirs = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).state_dict()
    finally:
        conversion_mapping.register_checkpoint_conversion_mapping("qwen3_vl_moe", registered, overwrite=True)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())


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


def test_a_weight_that_is_sent_alone_is_the_checkpoints_also_where_ranks_hold_parts_of_it(folder):
    model, stored = load(folder), load_file(folder / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    whole = model.get_parameter(name).detach().clone()
    # What ZeRO-3 leaves of a weight between passes.
    model.get_parameter(name).data = torch.empty(0)
    assert torch.equal(as_stored(model, {name: whole})[name], stored[name])


def test_the_layout_of_a_file_is_told_by_the_width_of_the_model():
    gate_up, down = "layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"
    for shape, expected in (((4, 64, 192), True), ((4, 192, 64), False), ((4, 64, 64), True)):
        assert is_released(gate_up, torch.Size(shape), hidden_size=64) is expected
    for shape, expected in (((4, 96, 64), True), ((4, 64, 96), False), ((4, 64, 64), True)):
        assert is_released(down, torch.Size(shape), hidden_size=64) is expected
    weights = {gate_up: torch.rand(4, 192, 64), down: torch.rand(4, 96, 64), "lm_head.weight": torch.rand(5, 64)}
    found = dict(released(weights.items(), hidden_size=64))
    assert torch.equal(found[gate_up], weights[gate_up].transpose(1, 2))
    assert all(found[name] is weights[name] for name in (down, "lm_head.weight"))


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


def test_the_engine_reads_what_transformers_writes(folder, prompts, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(folder, theirs)
    save_file(turned(load_file(folder / "model.safetensors")), theirs / "model.safetensors", metadata={"format": "pt"})
    # Nor does a config need to say how the weights of a token's experts are scaled.
    config = json.loads((theirs / "config.json").read_text())
    del config["text_config"]["norm_topk_prob"]
    (theirs / "config.json").write_text(json.dumps(config))
    actor = make_actor(folder, ban_media_tokens=True)
    with running_engine(KIT, theirs, max_images=1) as llm:
        samples = sampled(llm, KIT, prompts, banned=actor.banned_token_ids.tolist(), n=2, max_tokens=12)
    assert largest_difference(actor, prompts, samples) <= 1e-4
