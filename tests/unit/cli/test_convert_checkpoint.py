"""A checkpoint in Microsoft's layout, made from a small model by names written out beside it, converted back."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.commands import error_of
from helpers.conversations import message, picture
from helpers.original_checkpoints import CONFIG, IMAGE, RANK, SCALING, build_original
from helpers.tiny_models import run_kit
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Phi4MultimodalForCausalLM

from lmm_r1.cli.convert_checkpoint import main
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import get_kit, kit_of
from lmm_r1.lmm_kits.phi4_multimodal import conversion


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Phi4MultimodalForCausalLM]:
    """The folder, and the native model with the image adapter's products added."""
    folder = tmp_path_factory.mktemp("original")
    return folder, build_original(folder)


@pytest.fixture
def broken(original: tuple[Path, Phi4MultimodalForCausalLM], tmp_path: Path) -> Callable[..., Path]:
    """A function that makes a copy of the folder, in one weight file, with some things changed."""
    source, _ = original

    def copy(*, config: dict | None = None, weights: dict[str, torch.Tensor | None] | None = None) -> Path:
        folder = tmp_path / "broken"
        folder.mkdir()
        for file in source.iterdir():
            if not file.name.startswith("model"):
                (folder / file.name).write_bytes(file.read_bytes())
        settings = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, **(config or {})}))
        held = {}
        for file in source.glob("*.safetensors"):
            held |= load_file(file)
        held |= weights or {}
        save_file({name: weight for name, weight in held.items() if weight is not None}, folder / "model.safetensors")
        return folder

    return copy


def run(source: Path, output: Path) -> Path:
    main(["--input", str(source), "--output", str(output)])
    return output


def refusal(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    before = {path.name for path in tmp_path.iterdir()}
    argv = ["--input", str(source), "--output", str(tmp_path / "out")]
    sentence = error_of("convert_checkpoint", argv, capfd=capfd)
    assert {path.name for path in tmp_path.iterdir()} == before, "something was left behind"
    return sentence


def test_the_converted_model_is_the_native_one_with_the_image_adapter_merged(original, tmp_path, capsys):
    source, model = original
    output = run(source, tmp_path / "converted")
    said = capsys.readouterr().out
    assert "the image adapter is merged into 8 matrices of the language model, scaled by 2" in said
    assert "the speech adapter is left out: 16 weights, model.layers.0.mlp.down_proj.lora_A.speech.weight" in said

    converted = load_file(output / "model.safetensors")
    expected = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    assert set(converted) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(converted[name], weight, atol=1e-6, rtol=0, msg=name)

    kit = kit_of(str(output))
    assert kit is get_kit("phi4_multimodal")
    for messages in (
        [message("user", "What is 12 + 34?")],
        [message("user", picture(56, 56), picture(140, 84), "Add them.")],
    ):
        ids, logits = run_kit(kit, output, messages)
        processor = kit.load_processor(str(output), trust_remote_code=False)
        images = [part.source for part in messages[0].parts if not hasattr(part, "text")]
        media = {}
        if images:
            batch = processor(text=[processor.image_token * 2], images=images, return_tensors="pt")
            media = {key: batch[key] for key in ("image_pixel_values", "image_sizes", "image_attention_mask")}
        for module in model.modules():
            if hasattr(module, "is_causal") and "Vision" in type(module).__name__:
                module.is_causal = False
        with torch.no_grad():
            theirs = model(torch.tensor([ids]), **media).logits[0]
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)


def test_config_processor_and_tokenizer_are_written_with_what_the_original_says(original, tmp_path):
    source, model = original
    output = run(source, tmp_path / "converted")
    kit = get_kit("phi4_multimodal")
    config = kit.load_config(str(output), trust_remote_code=False)
    ignored = {"_name_or_path", "architectures", "transformers_version", "dtype"}
    told, expected = ({k: v for k, v in c.to_dict().items() if k not in ignored} for c in (config, model.config))
    assert told == expected
    assert json.loads((output / "config.json").read_text())["architectures"] == ["Phi4MultimodalForCausalLM"]
    processor = kit.load_processor(str(output), trust_remote_code=False)
    assert processor.image_processor.dynamic_hd == 12
    assert (processor.image_token, processor.audio_token) == ("<|endoftext10|>", "<|endoftext11|>")
    rendered = kit.render(processor, [message("user", picture(56, 56), "Which?")], add_generation_prompt=True)
    assert processor.tokenizer.decode(rendered) == "<|user|><|endoftext10|>Which?<|end|><|assistant|>"
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
    assert processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|user|><|endoftext10|>Which?<|end|><|assistant|>"
    )
    generation = json.loads((output / "generation_config.json").read_text())
    assert generation["eos_token_id"] == model.config.eos_token_id


def test_large_weights_are_written_in_several_files_with_an_index(original, tmp_path, monkeypatch):
    source, model = original
    monkeypatch.setattr(conversion, "SHARD_BYTES", 200_000)
    output = run(source, tmp_path / "converted")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = sorted(output.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.name == f"model-{n:05}-of-{len(files):05}.safetensors" for n, file in enumerate(files, start=1))
    held = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            held |= dict.fromkeys(weights.keys(), file.name)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(
        4 * weight.numel() for name, weight in model.state_dict().items() if name != "lm_head.weight"
    )
    assert kit_of(str(output)).load_model(
        str(output), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )


def test_half_precision_is_kept_and_rounded_once(broken, tmp_path):
    name = "model.layers.1.mlp.down_proj"
    halves = {}
    folder = broken()
    for key, weight in load_file(folder / "model.safetensors").items():
        halves[key] = weight.to(torch.bfloat16)
    save_file(halves, folder / "model.safetensors")
    converted = load_file(run(folder, tmp_path / "converted") / "model.safetensors")
    base, a, b = (
        halves[f"{name}.{part}"].float()
        for part in ("base_layer.weight", "lora_A.vision.weight", "lora_B.vision.weight")
    )
    assert torch.equal(converted[f"{name}.weight"], (base + SCALING * b @ a).to(torch.bfloat16))
    assert {weight.dtype for weight in converted.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"model.mystery.weight": torch.ones(1)}, "1 weight(s) of the checkpoint are unknown, and would be lost"),
        ({"model.layers.0.self_attn.qkv_proj.lora_magnitude_vector.vision.weight": torch.ones(1)}, "lora_magnitude"),
        ({"model.norm.weight": None}, "1 weight(s) of the checkpoint are missing; copy the whole checkpoint: model.norm.weight"),
        ({"model.layers.1.mlp.down_proj.lora_B.vision.weight": None}, "missing; copy the whole checkpoint: model.layers.1"),
        ({f"{IMAGE}glb_GN": None}, f"missing; copy the whole checkpoint: {IMAGE}glb_GN"),
        ({f"{IMAGE}img_processor.embeddings.position_embedding.weight": None}, "position_embedding"),
        ({"model.norm.weight": torch.ones(3)}, "size mismatch for model.norm.weight"),
        (
            {"model.layers.0.mlp.down_proj.lora_A.vision.weight": torch.ones(RANK + 1, 128)},
            "do not fit model.layers.0.mlp.down_proj.base_layer.weight (",
        ),
    ],
)  # fmt: skip
def test_every_weight_is_accounted_for(broken, tmp_path, capfd, weights, sentence):
    said = refusal(broken(weights=weights), tmp_path, capfd)
    assert sentence in said
    assert next(iter(weights)) in said


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"vision_lora": None}, "no vision_lora with lora_alpha and r"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of type 'linear' cannot be converted"),
        ({"attention_bias": True}, "attention_bias cannot be converted"),
        (
            {"embd_layer": {**CONFIG["embd_layer"], "image_embd_layer": {"hd_transform_order": "glb_sub"}}},
            "image_embd_layer.hd_transform_order 'glb_sub' cannot be converted, only 'sub_glb' can",
        ),
        ({"embd_layer": {}}, "image_embd_layer"),
        ({"model_type": "llama"}, "model_type 'llama' cannot be converted; what can be: phi4mm"),
        ({"model_type": "phi4_multimodal"}, "model_type 'phi4_multimodal' needs no conversion"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(broken, tmp_path, capfd, config, sentence):
    assert sentence in refusal(broken(config=config), tmp_path, capfd)


@pytest.mark.parametrize("file", ["tokenizer.json", "preprocessor_config.json", "config.json", "model.safetensors"])
def test_a_missing_file_is_named(broken, tmp_path, capfd, file):
    folder = broken()
    (folder / file).unlink()
    assert file in refusal(folder, tmp_path, capfd)


def test_folders_are_checked_first(original, tmp_path, capfd):
    source, _ = original
    assert "no such folder" in refusal(tmp_path / "nothing", tmp_path, capfd)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert "exists and is not empty" in refusal(source, tmp_path, capfd)


def test_the_other_commands_name_this_one(original):
    source, _ = original
    with pytest.raises(UserError, match=f"convert it first: lmm-r1 convert_checkpoint --input {source} --output"):
        kit_of(str(source))
