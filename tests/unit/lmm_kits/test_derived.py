"""Kits made of data: what their files may hold, how they are found, and what they refuse."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmm_r1 import cli, register_kit
from lmm_r1.cluster import KIT_VARIABLE, run_environment, worker_runtime
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import write_json_object
from lmm_r1.lmm_kits import get_kit, kit_of
from lmm_r1.lmm_kits.derived import CAPABILITIES, CONFIG_KEY, KitFile, derived_kit, read_kit
from lmm_r1.lmm_kits.registry import kit_name_of

FILE: dict[str, Any] = {
    "model_type": "mistral3",
    "config_class": "Mistral3Config",
    "model_class": "Mistral3ForConditionalGeneration",
    "processor_class": "PixtralProcessor",
    "image_token": "[IMG]",
    "image_mark": "[IMG]",
    "placeholder": "[IMG]",
    "placeholder_id": 10,
    "opening": None,
    "closing": "[IMG_END]",
    "media_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "media_keys": ["pixel_values", "image_sizes"],
    "token_inputs": {},
    "positions": "text",
    "adds_start": False,
    "text_as_parts": False,
    "vision_prefixes": ["model.vision_tower."],
    "projector_prefixes": ["model.multi_modal_projector."],
    "language_prefixes": ["model.language_model.", "lm_head."],
    "untrained_prefixes": [],
    "language_model": "model.language_model",
    "blank_ids": [[10, 2], [13, 1]],
    "blank_media": {
        "pixel_values": {"dtype": "float32", "shape": [1, 3, 28, 56], "integers": None},
        "image_sizes": {"dtype": "int64", "shape": [1, 2], "integers": [28, 56]},
    },
    "capabilities": {name: {"confirmed": True, "reason": "tested"} for name in CAPABILITIES},
}


@pytest.fixture
def own_variable(monkeypatch):
    """Registered files are forgotten after the test."""
    monkeypatch.setenv(KIT_VARIABLE, "")


def changed(**values: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FILE), **values}


def without(capability: str, reason: str) -> dict[str, Any]:
    return changed(capabilities={**FILE["capabilities"], capability: {"confirmed": False, "reason": reason}})


def written(folder: Path, data: object) -> Path:
    file = folder / "kit.json"
    file.write_text(json.dumps(data))
    return file


def checkpoint(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "vision_config": {}, **config}))
    return str(folder)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "a JSON object"),
        (changed(code="import os"), "code: Unexpected keyword"),
        ({key: value for key, value in FILE.items() if key != "placeholder"}, "placeholder: Field required"),
        (changed(placeholder_id=True), "placeholder_id: Input should be a valid integer"),
        (changed(blank_ids=[[10, 2, 3]]), "blank_ids.0: List should have at most 2 items"),
        (changed(capabilities={"sft": {"confirmed": True, "reason": ""}}), "capabilities.freezing is missing"),
        (changed(capabilities={"sft": True}), "capabilities.sft: Input should be an object"),
    ],
)
def test_a_file_that_is_no_kit_is_refused_with_file_and_key(data, problem, tmp_path):
    file = written(tmp_path, data)
    with pytest.raises(UserError, match=problem) as refused:
        read_kit(file)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model_class", "os.system"),
        ("model_class", "Mistral3Config"),
        ("config_class", "PixtralProcessor"),
        ("processor_class", "lmm_r1.cli.main"),
    ],
)
def test_classes_are_looked_up_in_transformers_alone(key, name, tmp_path):
    file = KitFile.parsed(changed(**{key: name}), place="kit.json")
    with pytest.raises(UserError, match=f"kit.json: {key}: transformers .* called {name}"):
        derived_kit(file, place="kit.json")


def test_a_kit_with_which_nothing_can_be_trained_is_refused():
    file = KitFile.parsed(without("sft", "the processor writes two marks"), place="kit.json")
    with pytest.raises(UserError, match=r"kit.json: .* cannot be trained: the processor writes two marks"):
        derived_kit(file, place="kit.json")


def test_a_file_survives_being_written_and_read(tmp_path):
    file = KitFile.parsed(FILE, place="here")
    write_json_object(tmp_path / "kit.json", file.data)
    assert read_kit(tmp_path / "kit.json") == file
    assert file.data == FILE


def test_equal_files_make_equal_kits_here_and_in_another_process(tmp_path):
    kit, again = (derived_kit(KitFile.parsed(FILE, place="here"), place=place) for place in ("here", "there"))
    other = derived_kit(KitFile.parsed(changed(closing=None), place="here"), place="here")
    assert kit == again == pickle.loads(pickle.dumps(kit)) == copy.deepcopy(kit)
    assert hash(kit) == hash(again)
    assert kit != other
    assert kit != get_kit("llm")
    (tmp_path / "kit.pickle").write_bytes(pickle.dumps(kit))
    loaded = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).vision_prefixes)"
    done = subprocess.run(
        [sys.executable, "-c", loaded, str(tmp_path / "kit.pickle")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "('model.vision_tower.',)"


def test_without_a_file_the_error_names_the_command_that_derives_one(own_variable, tmp_path):
    with pytest.raises(UserError, match="kits --derive MODEL"):
        kit_of(checkpoint(tmp_path))


def test_a_registered_file_serves_its_architecture_and_workers_inherit_it(own_variable, tmp_path):
    kit = register_kit(written(tmp_path, FILE))
    model = checkpoint(tmp_path)
    assert kit_of(model) == kit
    assert kit_name_of(model) == "mistral3"
    assert kit_of(model).takes_images
    assert os.environ[KIT_VARIABLE] == str(tmp_path / "kit.json")
    runtime = worker_runtime(run_environment())
    assert runtime["env_vars"][KIT_VARIABLE] == str(tmp_path / "kit.json")
    assert kit_name_of(checkpoint(tmp_path, model_type="qwen2_vl")) == "qwen2_vl"
    with pytest.raises(UserError, match="no kit for model_type 'cohere2_vision'"):
        kit_of(checkpoint(tmp_path, model_type="cohere2_vision"))


def test_a_kit_of_our_own_is_not_replaced_by_a_file(own_variable, tmp_path):
    with pytest.raises(UserError, match="'qwen2_vl' has a kit of its own"):
        register_kit(written(tmp_path, changed(model_type="qwen2_vl")))
    assert kit_of(model_of(tmp_path)) == get_kit("qwen2_vl")


def model_of(folder: Path) -> str:
    return checkpoint(folder, model_type="qwen2_vl", **{CONFIG_KEY: changed(model_type="qwen2_vl")})


def test_a_saved_model_has_its_kit_in_its_config(own_variable, tmp_path):
    assert kit_of(checkpoint(tmp_path, **{CONFIG_KEY: FILE})).model_type == "mistral3"
    with pytest.raises(UserError, match="model_type is 'mistral3', but the model's is 'cohere2_vision'"):
        kit_of(checkpoint(tmp_path, model_type="cohere2_vision", **{CONFIG_KEY: FILE}))
    with pytest.raises(UserError, match=f"{CONFIG_KEY} in config.json: extra: Unexpected keyword"):
        kit_of(checkpoint(tmp_path, **{CONFIG_KEY: changed(extra=1)}))


def test_the_option_before_the_command_registers_a_file(own_variable, tmp_path, capsys):
    cli.main(["--kit", str(written(tmp_path, FILE)), "--version"])
    assert os.environ[KIT_VARIABLE] == str(tmp_path / "kit.json")
    for arguments, problem in ((["--kit"], "--kit needs the file"), (["--kit", str(tmp_path / "no.json")], "no.json")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments)
        assert problem in capsys.readouterr().err


def test_what_is_not_confirmed_is_off_with_its_reason():
    kit = derived_kit(KitFile.parsed(without("rl", "vLLM has no class for it"), place="here"), place="here")
    assert kit.engine_refusal == "vLLM has no class for it"
    kit = derived_kit(KitFile.parsed(without("lora", "its routers are linear"), place="here"), place="here")
    with pytest.raises(UserError, match=r"--ds.lora.rank 4: mistral3 .* \(its routers are linear\)"):
        kit.check("lora", flag="--ds.lora.rank 4")
    assert not kit.takes_videos


def test_the_blank_image_and_merged_media_are_made_without_a_processor():
    kit = derived_kit(KitFile.parsed(FILE, place="here"), place="here")
    ids, media = kit.filler_media(None)
    assert ids == [10, 10, 13]
    assert media["image_sizes"].tolist() == [[28, 56]]
    assert media["pixel_values"].shape == (1, 3, 28, 56)
    ones = {"pixel_values": torch.ones(2, 3, 56, 28), "image_sizes": torch.tensor([[56, 28]] * 2)}
    merged = kit.merge_media([media, ones])
    assert merged["pixel_values"].shape == (3, 3, 56, 56)
    assert merged["pixel_values"].sum() == ones["pixel_values"].sum()
    assert torch.equal(merged["pixel_values"][1:, :, :, :28], ones["pixel_values"])
    assert merged["image_sizes"].tolist() == [[28, 56], [56, 28], [56, 28]]


class Tokens:
    """A tokenizer that knows three tokens."""

    unk_token_id = None

    def convert_tokens_to_ids(self, token: str) -> int:
        return {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}[token]


class Processor:
    tokenizer = Tokens()


@pytest.mark.parametrize(
    ("ids", "collapsed"),
    [
        # Two images next to each other, of 2 x 2 and 1 x 2 features.
        ([1, 10, 10, 12, 10, 10, 13, 10, 10, 13, 2], [1, 10, 10, 2]),
        ([10, 13, 5, 10, 13], [10, 5, 10]),
        # Not expanded.
        ([1, 10, 2], [1, 10, 2]),
        ([1, 2], [1, 2]),
    ],
)
def test_expanded_images_become_one_token_each(ids, collapsed):
    kit = derived_kit(KitFile.parsed(FILE, place="here"), place="here")
    assert kit.collapsed(Processor(), ids) == collapsed
