"""Text handed out token by token, prompts that threads encode, ends of turns, and the correction for an engine that disagrees."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.conversations import message, picture, row
from helpers.tiny_models import altered
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.generation.request import (
    CORRECTION,
    PromptCodec,
    TextStream,
    check_turn_end,
    with_correction,
)
from lmm_r1.lmm_kits import KITS, LmmKit, get_kit


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, as byte-level tokenizers have for rare characters."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("text", ["", "2 + 2", "né 数 🙂!", "🙂🙂", "a\ufffdb"])
@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_the_pieces_make_up_the_text_and_none_ends_within_a_character(text, at_once, tokenizer):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.add(ids[start : start + at_once]) for start in range(0, len(ids), at_once)]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.rest()]) == text


@pytest.mark.parametrize(
    ("prompt", "prefill", "begun"),
    [
        ("user: 2+2?\nassistant: ", "", ""),
        ("user: 2+2?\nassistant: <think>\n", "", "<think>\n"),
        ("user: write <think>\nassistant: ", "", ""),
        ("user: 2+2?\nassistant: <think>", "<think>", "<think>"),
    ],
)
def test_a_thought_that_the_chat_template_opens_stands_in_front_of_the_response(prompt, prefill, begun, tokenizer):
    codec = PromptCodec.__new__(PromptCodec)
    codec.tokenizer = tokenizer
    row = Row(messages=(), answer="4", datasource="", location="rows.jsonl:1", prefill=prefill)
    assert codec.begun_with(row, tokenizer(prompt, add_special_tokens=False)["input_ids"]) == begun


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
        UserError, match=r"X: the chat template renders an answer as 'Yes\.<\|im_end\|>\\n', .* \(</s>\)"
    ):
        check("aria", folder)


def test_an_end_token_of_the_generation_config_is_one(tiny_checkpoint, tmp_path):
    """Released tokenizers often name another one than their chat template writes."""
    folder = shutil.copytree(tiny_checkpoint("llm"), tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    check("llm", folder)
    (folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match=r"\(<\|endoftext\|>\), so no response would end"):
        check("llm", folder)


def policy_of(kit: LmmKit) -> SimpleNamespace:
    return SimpleNamespace(kit=kit, config=SimpleNamespace())


POLICY = policy_of(altered(get_kit("llm"), engine_disagreement="the engine attends causally within images"))
TEXT, IMAGE = row(message("user", "1+1?")), row(message("user", picture(8, 8), "Which digit?"))


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_cuda", lambda: False)


def test_image_rows_of_a_kit_that_disagrees_are_corrected_per_token_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        corrected = with_correction(PPOConfig(), policy=POLICY, rows=[TEXT, IMAGE])
    assert dotted.get(corrected, CORRECTION) == "token"
    (record,) = caplog.records
    assert record.getMessage() == (
        "the engine attends causally within images; its samples are corrected for that "
        "(--algo.advantage.is_correction_level token)"
    )
