"""The kits of Qwen3.5: released names and layouts, and vLLM on CPUs in its own ways."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import largest_difference, running_engine, sampled
from helpers.tiny_models import encode, make_actor, reshaped
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from lmm_r1.config.shared import Speculation
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, get_kit

DENSE, MIXTURE = get_kit("qwen3_5"), get_kit("qwen3_5_moe")
LONG = "What is 12 + 34? Which digit does the picture show? " * 12
# Of a linear layer of the sizes that transformers has as its default, in the files of the releases.
RELEASED_LAYER = {
    "A_log": (32,),
    "conv1d.weight": (8192, 1, 4),
    "dt_bias": (32,),
    "in_proj_a.weight": (32, 4096),
    "in_proj_b.weight": (32, 4096),
    "in_proj_qkv.weight": (8192, 4096),
    "in_proj_z.weight": (4096, 4096),
    "norm.weight": (128,),
    "out_proj.weight": (4096, 4096),
}


def prompts_of(kit: LmmKit, folder: Path) -> list[EncodedPrompt]:
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    questions = ([picture(84, 56), "Which digit is this?"], [LONG], [f"{LONG}So?"])
    return [encode(kit, processor, [message("user", *parts)]) for parts in questions]


def off(kit: LmmKit, folder: Path, *, dtype: str = "float32", max_tokens: int = 12, **engine: Any) -> float:
    """Return by how much the engine's log-probs of what it samples are off from the trainer's at most."""
    prompts = prompts_of(kit, folder)
    actor = make_actor(folder, ban_media_tokens=True, param_dtype={"float32": "fp32", "bfloat16": "bf16"}[dtype])
    banned = actor.banned_token_ids.tolist()
    with running_engine(kit, folder, max_images=1, dtype=dtype, **engine) as llm:
        samples = [sampled(llm, kit, prompts, banned=banned, n=2, max_tokens=max_tokens) for _ in range(2)]
    return max(float(largest_difference(actor, prompts, each)) for each in samples)


def test_a_linear_layer_has_the_released_names_and_shapes():
    with torch.device("meta"):
        layers = Qwen3_5ForConditionalGeneration(Qwen3_5Config()).model.language_model.layers
    linear = [layer for layer in layers if hasattr(layer, "linear_attn")]
    # Every fourth layer has full attention.
    assert len(linear) == len(layers) * 3 // 4
    shapes = {name: tuple(weight.shape) for name, weight in linear[0].linear_attn.named_parameters()}
    assert shapes == RELEASED_LAYER


def test_weights_for_speculative_decoding_are_neither_loaded_nor_saved(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "mtp.fc.weight": torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    model = DENSE.load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False)
    model.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == weights.keys()
    assert off(DENSE, folder) < 1e-4


def fused(folder: Path, copy: Path) -> Path:
    """Write a copy of a checkpoint with two tensors of experts per layer, (E, out, in) each."""
    shutil.copytree(folder, copy)
    weights = load_file(folder / "model.safetensors")
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(weights):
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(found[1], {}).setdefault(found[3], []).append(weights.pop(name))
    assert experts
    for layer, parts in experts.items():
        gates = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        weights[f"{layer}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gates])
        weights[f"{layer}.down_proj"] = torch.stack(parts["down_proj"])
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_both_layouts_of_experts_are_read_by_trainer_and_engine_and_kept_when_saved(tiny_checkpoint, tmp_path):
    single = tiny_checkpoint("qwen3_5_moe")
    both = {"single": single, "fused": fused(single, tmp_path / "fused")}
    models = {}
    for layout, folder in both.items():
        models[layout] = MIXTURE.load_model(
            str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        models[layout].save_pretrained(tmp_path / f"{layout} saved")
        saved = load_file(tmp_path / f"{layout} saved" / "model.safetensors")
        assert saved.keys() == load_file(folder / "model.safetensors").keys()
    theirs = models["single"].state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in models["fused"].state_dict().items())
    assert off(MIXTURE, both["fused"]) < 1e-4


def test_a_prompt_that_vllm_reads_in_parts_or_from_its_cache_is_the_same_prompt(tiny_checkpoint):
    parts = {"max_num_batched_tokens": 128, "enable_chunked_prefill": True}
    assert off(DENSE, tiny_checkpoint("qwen3_5"), enable_prefix_caching=True, block_size=32, **parts) < 1e-4


def test_in_bfloat16_vllms_kernel_and_ours_agree_with_the_trainer(tiny_checkpoint, tmp_path):
    for width in (64, 32):
        sizes = {"linear_key_head_dim": width, "linear_value_head_dim": width}
        folder = reshaped(DENSE, tiny_checkpoint("qwen3_5"), tmp_path / str(width), sizes)
        # Rounded to 8 bits, log-probs of some 6 are off by a few hundredths.
        assert off(DENSE, folder, dtype="bfloat16") < 0.3


def test_guessed_tokens_are_refused_where_the_kernel_is_not_vllms(tiny_checkpoint):
    from vllm.distributed import cleanup_dist_env_and_memory

    guessing = Speculation(tokens=2)
    try:
        with pytest.raises(UserError, match="--vllm.speculative_tokens: on CPUs, linear attention layers"):
            off(DENSE, tiny_checkpoint("qwen3_5"), speculation=guessing)
    finally:
        # An engine that was not finished leaves its process group behind.
        cleanup_dist_env_and_memory()
