"""An adapter of a file on a tiny model: loaded, merged and written as a checkpoint; and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.tables import table
from helpers.tiny_models import encode, make_actor, pad
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lmm_r1.checkpoints.merging import adapter_base, load_with_adapter, merge_adapter, write_checkpoint
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, LmmKit, get_kit
from lmm_r1.models.adapters import adapted_layers, merged_state_dict, save_adapter

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("llm")


def write_adapter(base: Path, folder: Path) -> PreTrainedModel:
    """An adapter as our trainers save it, whose second factors are random; returns the adapted model."""
    torch.manual_seed(0)
    model = make_actor(base, lora_rank=4, lora_alpha=8).model
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    save_adapter(model, folder)
    return model


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    write_adapter(base, folder)
    return folder


def load(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_with_adapter(str(base), adapter, dtype=dtype, trust_remote_code=False)


def logits(model: PreTrainedModel, kit: LmmKit, base: Path) -> torch.Tensor:
    """Of a prompt with an image where the kit takes them, (T, V)."""
    processor = kit.load_processor(str(base), trust_remote_code=False)
    image = (picture(84, 56),) if kit.takes_images else ()
    encoded = encode(kit, processor, [message("user", *image, "What is 12 + 34?")])
    sequences, mask = pad([encoded.token_ids], side="right")
    media = None if encoded.media is None else kit.merge_media([encoded.media])
    if media is not None:
        media = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in media.items()}
    with torch.no_grad():
        inputs = kit.forward_inputs(model.config, sequences, mask, media)
        return model(sequences, attention_mask=mask, use_cache=False, **inputs).logits[0]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("name", KITS)
def test_an_adapter_is_loaded_and_merged_exactly(name, tiny_checkpoint, tmp_path):
    kit, base = get_kit(name), tiny_checkpoint(name)
    trained = write_adapter(base, tmp_path / "adapter")
    assert adapter_base(tmp_path / "adapter") == str(base)

    model = load(base, tmp_path / "adapter")
    assert not model.training
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in trained.state_dict().items())
    unmerged = logits(model, kit, base)
    expected = merged_state_dict(model)
    merge_adapter(model)
    merged = model.state_dict()
    assert set(merged) == set(expected)
    assert all(torch.equal(merged[key], value) for key, value in expected.items())
    # Of the next token: see the contract of merged checkpoints for how rounding grows with the number of logits.
    assert difference(logits(model, kit, base)[-1], unmerged[-1]) <= 1e-5


# The language model's names before transformers 4.52; those of other kits have not changed.
OLD_NAMES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "model."),
    **dict.fromkeys(("aria", "gemma3", "internvl", "llava_onevision"), "language_model.model."),
}


@pytest.mark.parametrize("regex", [False, True])
@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_adapter_with_names_from_before_transformers_4_52_is_loaded(name, regex, tiny_checkpoint, tmp_path):
    base, old = tiny_checkpoint(name), OLD_NAMES[name]
    trained = write_adapter(base, tmp_path / "adapter").state_dict()
    file, prefix = tmp_path / "adapter" / WEIGHTS, "base_model.model."
    tensors = load_file(file)
    tensors = {key.replace(f"{prefix}model.language_model.", f"{prefix}{old}"): tensors[key] for key in tensors}
    assert all(key.startswith(f"{prefix}{old}layers.") for key in tensors)
    save_file(tensors, file)
    layers = sorted({key.removeprefix(prefix).partition(".lora_")[0] for key in tensors})
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings["target_modules"] = f"{old}layers.*_proj".replace(".", r"\.").replace("*", ".*") if regex else layers
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    loaded = load(base, tmp_path / "adapter").state_dict()
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[key], value) for key, value in trained.items())


def test_an_adapter_that_plain_peft_saved_is_merged_as_peft_merges_it(base, tmp_path):
    torch.manual_seed(0)
    settings = {"r": 2, "lora_alpha": 6, "use_rslora": True, "init_lora_weights": False}
    plain = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(target_modules=["q_proj", "down_proj"], **settings),
    )
    plain.save_pretrained(tmp_path / "adapter")
    model = load(base, tmp_path / "adapter")
    assert len(adapted_layers(model)) == 4
    merge_adapter(model)
    expected = plain.merge_and_unload().state_dict()
    assert set(model.state_dict()) == set(expected)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


def test_a_written_checkpoint_is_the_merged_model_in_the_precision_and_shards_asked_for(base, adapter, tmp_path):
    source = tmp_path / "base"
    shutil.copytree(base, source)
    (source / "LICENSE.txt").write_text("free")
    (source / "stage.json").write_text("{}")
    kit = get_kit("llm")
    model = load(source, adapter)
    merge_adapter(model)
    expected = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    output = tmp_path / "deep" / "merged"
    write_checkpoint(
        model,
        kit=kit,
        processor=kit.load_processor(str(source), trust_remote_code=False),
        output=output,
        dtype=torch.bfloat16,
        max_shard_size="60KB",
    )
    files = {path.name for path in output.iterdir()}
    parts = [load_file(output / name) for name in files if name.endswith(".safetensors")]
    assert len(parts) > 1
    assert "model.safetensors.index.json" in files
    stored = {name: value for part in parts for name, value in part.items()}
    assert set(stored) == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in stored.items())
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    assert (output / "LICENSE.txt").read_text() == "free"
    assert "stage.json" not in files
    assert {"generation_config.json", "tokenizer.json", "chat_template.jinja"} <= files
    assert not [path for path in output.parent.iterdir() if path != output]
    again = kit.load_model(str(output), dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def changed(adapter: Path, folder: Path, **settings: object) -> Path:
    """A copy of an adapter with other settings."""
    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "message"), table("checkpoints/merging", "a_config_that_is_not_of_this_adapter_is_refused")
)
def test_a_config_that_is_not_of_this_adapter_is_refused(settings, message, base, adapter, tmp_path):
    with pytest.raises(UserError, match=message):
        load(base, changed(adapter, tmp_path / "adapter", **settings))


def test_an_adapter_without_some_tensors_is_refused_with_their_places(base, adapter, tmp_path):
    folder = changed(adapter, tmp_path / "adapter")
    tensors = load_file(folder / WEIGHTS)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=r"missing for 1 places .*layers\.1\.self_attn\.q_proj\.lora_A"):
        load(base, folder)


def test_a_folder_that_is_no_adapter_or_damaged_is_refused(base, adapter, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        adapter_base(tmp_path / "missing")
    with pytest.raises(UserError, match="no adapter_config.json"):
        adapter_base(base)
    folder = changed(adapter, tmp_path / "adapter", base_model_name_or_path=None)
    assert adapter_base(folder) is None
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="the weight file is damaged"):
        load(base, folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        adapter_base(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"no {WEIGHTS}"):
        adapter_base(folder)
