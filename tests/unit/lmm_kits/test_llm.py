"""Which architectures are plain language models: every causal model of transformers is taken or refused in a sentence."""

import json

import pytest
import torch
from helpers.tables import table
from helpers.tiny_models import pad
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, get_kit, kit_of
from lmm_r1.lmm_kits.llm import refusal_of

REFUSED = table("lmm_kits/llm", "refused")
TAKEN = """
afmoe apertus arcee aria_text axk1 axk2 bamba biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm dbrx deepseek_v2 deepseek_v3
deepseek_v32 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 flex_olmo gemma gemma2 gemma3_text
gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neox
granite granitemoe granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
inkling_text jais2 jamba jetmoe laguna lfm2 lfm2_moe llama llama4_text longcat_flash mellum minicpm3 minimax minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat nemotron nemotron_h olmo olmo2 olmo3
olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu zamba zamba2 zaya
""".split()
# Of the kinds of attention, positions, norms and mixtures that there are.
TRIED = (
    "falcon gemma2 gemma3_text gpt2 gpt_neox lfm2 llama mixtral nemotron olmo2 opt phi phi3 qwen2_moe qwen3 qwen3_moe "
    "qwen3_next"
).split()
SIZES = table("lmm_kits/llm", "sizes")
MORE = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
}
ROWS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33, 34, 35]]


def test_every_causal_model_of_transformers_is_taken_or_refused():
    reasons = {name: reason for reason, names in REFUSED.items() for name in names.split()}
    found = {name: refusal_of(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in KITS}
    assert {name for name, reason in found.items() if reason is None} == set(TAKEN)
    assert found.keys() - set(TAKEN) == reasons.keys()
    for name, reason in reasons.items():
        assert reason in found[name], name


@pytest.mark.parametrize("name", TRIED)
def test_what_is_taken_gives_each_row_of_a_batch_what_it_gives_alone(name, tmp_path):
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **MORE.get(name, {})))
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    made.save_pretrained(tmp_path)
    kit = kit_of(str(tmp_path))
    assert kit.model_type == "llm"
    model = kit.load_model(
        str(tmp_path), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    ).eval()

    def logits(rows: list[list[int]], side: str) -> list[torch.Tensor]:
        sequences, mask = pad(rows, side=side)
        inputs = kit.forward_inputs(model.config, sequences, mask, None)
        with torch.no_grad():
            output = model(input_ids=sequences, attention_mask=mask, use_cache=False, **inputs).logits
        return [values[attended.bool()] for values, attended in zip(output, mask, strict=True)]

    alone = [logits([row], "right")[0] for row in ROWS]
    for side in ("left", "right"):
        for one, other in zip(logits(ROWS, side), alone, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    changed = logits([[*ROWS[0][:-1], 60]], "right")[0]
    torch.testing.assert_close(changed[:-1], alone[0][:-1], atol=1e-5, rtol=0)
    assert (changed[-1] - alone[0][-1]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["bloom", "mpt", "mamba", "gpt_oss", "bert", "whisper"])
def test_what_is_refused_is_told_before_anything_is_loaded(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(UserError, match=rf"no kit for model_type '{name}' \(.+\); known: .*'llm' serves"):
        kit_of(str(tmp_path))


def test_a_model_with_code_of_its_own_and_an_image_processor_is_refused(tmp_path):
    """Molmo's config does not tell that it takes images."""
    config = {"model_type": "molmo", "hidden_size": 64, "auto_map": {"AutoModelForCausalLM": "modeling_molmo.Molmo"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kit_of(str(tmp_path), trust_remote_code=True) is get_kit("llm")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(
        UserError, match="no kit for model_type 'molmo' .*preprocessor_config.json, and so takes images"
    ):
        kit_of(str(tmp_path), trust_remote_code=True)
