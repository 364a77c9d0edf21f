"""`lmm-r1 convert_checkpoint`: the model, the tokenizer and the ends of turns of a GGUF file."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmm_r1.cli import convert_checkpoint
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import kit_of

TEXTS = ("What is 60 - 43?", "I'm 12345 years\n\n old.", "<|im_start|>user\né 中<|im_end|>\n")
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
}


def written(model: Path, file: Path, *, pre: str = "qwen2") -> Path:
    """Write a checkpoint of Qwen2's type as llama.cpp would."""
    config, tokens = json.loads((model / "config.json").read_text()), AutoTokenizer.from_pretrained(model)
    stored = json.loads((model / "tokenizer.json").read_text())
    special = {one["content"] for one in stored["added_tokens"]}
    names = sorted(tokens.get_vocab(), key=tokens.get_vocab().get)
    writer = gguf.GGUFWriter(file, "qwen2")
    for field, name in SIZES.items():
        getattr(writer, f"add_{field}")(config[name])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([3 if name in special else 1 for name in names])
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_eos_token_id(tokens.eos_token_id)
    writer.add_chat_template(tokens.chat_template)
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, weight in AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict().items():
        writer.add_tensor(places.get_name(name, try_suffixes=(".weight", ".bias")), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_becomes_the_checkpoint_that_it_was_made_of(tiny_checkpoint, tmp_path, capsys):
    model, output = tiny_checkpoint("llm"), tmp_path / "made"
    file = written(model, tmp_path / "model.gguf")
    convert_checkpoint.main([str(file), "--output", str(output), "--dtype", "float32"])
    assert "turns end with <|im_end|>" in capsys.readouterr().out
    before, after = map(AutoTokenizer.from_pretrained, (model, output))
    for text in TEXTS:
        assert after(text).input_ids == before(text).input_ids
    assert after.chat_template == before.chat_template
    assert (after.eos_token, after.pad_token) == ("<|im_end|>", "<|im_end|>")
    ids = torch.tensor([before(TEXTS[0]).input_ids])
    logits = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits for path in (model, output)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)


def test_a_file_of_other_texts_is_refused_and_one_that_is_given_as_a_model(tiny_checkpoint, tmp_path, capsys):
    file = written(tiny_checkpoint("llm"), tmp_path / "model.gguf", pre="deepseek-coder")
    with pytest.raises(SystemExit):
        convert_checkpoint.main([str(file), "--output", str(tmp_path / "made")])
    assert "cuts texts as 'deepseek-coder'; known: gpt-2, smollm, qwen2, llama-bpe" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"lmm-r1 convert_checkpoint {file} --output DIR"):
        kit_of(str(file))
