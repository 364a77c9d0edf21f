"""A run's checkpoint must end a turn with a token at which a response ends."""

import json
import shutil
from pathlib import Path

import pytest

from lmm_r1.errors import UserError
from lmm_r1.generation.codec import check_turn_end
from lmm_r1.lmm_kits import KITS, get_kit

FLAG = "--actor.model_name_or_path X"


def check(name: str, folder: Path) -> None:
    kit = get_kit(name)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    check_turn_end(kit, processor, path=str(folder), model=FLAG)


@pytest.mark.parametrize("name", KITS)
def test_every_kit_ends_a_turn_with_a_token(name, tiny_checkpoint):
    check(name, tiny_checkpoint(name))


def without_end_token(folder: Path, copy: Path) -> Path:
    """Copy a checkpoint whose tokenizer spells <|im_end|> in several tokens and ends a text with another one, as Aria's."""
    shutil.copytree(folder, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<|im_end|>"]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["eos_token"] = "</s>"
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = json.loads((copy / "generation_config.json").read_text())
    generation["eos_token_id"] = settings_id(tokenizer, "</s>")
    (copy / "generation_config.json").write_text(json.dumps(generation))
    return copy


def settings_id(tokenizer: dict, token: str) -> int:
    return next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == token)


def test_an_end_of_turn_that_is_spelt_in_several_tokens_is_refused(tiny_checkpoint, tmp_path):
    folder = without_end_token(tiny_checkpoint("aria"), tmp_path / "model")
    kit = get_kit("aria")
    tokenizer = kit.tokenizer_of(kit.load_processor(str(folder), trust_remote_code=False))
    assert len(tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]) > 1
    with pytest.raises(
        UserError, match=r"X: the chat template writes an answer as 'Yes\.<\|im_end\|>\\n', .* \(</s>\)"
    ):
        check("aria", folder)


def test_an_end_token_of_the_generation_config_is_one(tiny_checkpoint, tmp_path):
    """Released tokenizers often name another one than their chat template writes."""
    folder = shutil.copytree(tiny_checkpoint("llm"), tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    check("llm", folder)
    (folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match=r"\(<\|endoftext\|>\), so that no response would end"):
        check("llm", folder)
