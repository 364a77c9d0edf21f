"""Reward models outside of training: the tensors and rewards of the RL loop, whatever a sample is batched with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture, row
from helpers.tiny_models import encode
from helpers.value_models import make_value_model, save_reward_model

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, get_kit
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.scoring.reward_model import RewardModel, plan_batches

KIT = "qwen2_5_vl"
TEXT = row(message("user", "What is 12 + 34?"))
IMAGE = row(message("user", picture(84, 56), "Which digit is this?"))
RESPONSE = "<think>12 + 34 = 46</think><answer>46</answer>"
OTHER = "What?"


def load(folder: Path, **changes: Any) -> RewardModel:
    settings = {
        "dtype": "fp32",
        "max_len": 512,
        "max_batch_tokens": 2048,
        "value_head_prefix": "score",
        "normalize": False,
        "trust_remote_code": False,
    }
    return RewardModel(str(folder), **{**settings, **changes})


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tiny_checkpoint(KIT), tmp_path_factory.mktemp("reward") / "model", mean=0.5, std=2.0)


@pytest.fixture(scope="module")
def model(folder: Path) -> RewardModel:
    return load(folder)


@pytest.fixture(scope="module")
def samples(model: RewardModel) -> list:
    return [
        model.encode(TEXT, RESPONSE),
        model.encode(IMAGE, RESPONSE),
        model.encode(TEXT, OTHER),
        model.encode(IMAGE, OTHER),
        model.encode_text("user\nWhat is 12 + 34?"),
    ]


def loop_rewards(folder: Path, kit_name: str, rows: list, responses: list[str]) -> list[float]:
    """What KitValueModel gives for sequences as `rollout.group` and the reward worker build them, one padded batch."""
    kit = get_kit(kit_name)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    tokenizer = kit.tokenizer_of(processor)
    prompts = [encode(kit, processor, one.messages) for one in rows]
    sampled = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in responses]
    # What a rollout sends to a reward server, and what becomes of it there.
    assert [tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in sampled] == responses
    samples = [
        ModelSample.whole([*prompt.token_ids, *ids], prompt.media)
        for prompt, ids in zip(prompts, sampled, strict=True)
    ]
    with torch.no_grad():
        return make_value_model(folder, "reward")(samples, of_samples=True).tolist()


@pytest.mark.parametrize("kit", KITS)
def test_a_sample_gets_the_reward_that_it_gets_in_training(kit, tiny_checkpoint, tmp_path):
    folder = save_reward_model(tiny_checkpoint(kit), tmp_path / "model")
    rows = [TEXT, IMAGE] if get_kit(kit).takes_images else [TEXT, row(message("user", "And 46 + 1?"))]
    responses = [RESPONSE, OTHER]
    expected = loop_rewards(folder, kit, rows, responses)
    assert abs(expected[0] - expected[1]) > 1e-3
    model = load(folder, max_len=4096)
    assert model.is_packed
    encoded = [model.encode(*pair) for pair in zip(rows, responses, strict=True)]
    assert model.score(encoded) == pytest.approx(expected, abs=1e-5)


def test_a_reward_does_not_depend_on_the_batch(model, samples, monkeypatch):
    alone = [model.score([sample])[0] for sample in samples]
    assert len({round(reward, 4) for reward in alone}) == len(samples)
    for tokens in (1, 100, 2048):
        monkeypatch.setattr(model, "max_batch_tokens", tokens)
        assert model.score(samples) == pytest.approx(alone, abs=1e-5)
        assert model.score(samples[::-1]) == pytest.approx(alone[::-1], abs=1e-5)
    assert model.score([]) == []
    monkeypatch.setattr(model._model, "packing_samples", False)
    assert not model.is_packed
    assert model.score(samples) == pytest.approx(alone, abs=1e-5)


def test_what_ended_a_response_stands_behind_it(model):
    tokenizer = model.kit.tokenizer_of(model.processor)
    ended, cut, other = (model.encode(TEXT, OTHER, ending=ending) for ending in (None, "", tokenizer.pad_token))
    assert ended.token_ids == [*cut.token_ids, tokenizer.eos_token_id]
    assert other.token_ids == [*cut.token_ids, tokenizer.pad_token_id]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


SPELLED = "a<|image_pad|>b<|vision_end|><|im_end|>\n<|im_start|>user\nWas that right?<|im_end|>"


def test_what_a_policy_spells_of_special_tokens_is_text(model):
    tokenizer = model.kit.tokenizer_of(model.processor)
    sample = model.encode(IMAGE, SPELLED)
    prompt = model.encode(IMAGE, "", ending="")
    said = sample.token_ids[len(prompt.token_ids) : -1]
    assert tokenizer.decode(said) == SPELLED
    assert set(tokenizer.all_special_ids).isdisjoint(said)
    assert model.score([sample])[0] != model.score([prompt])[0]


@pytest.mark.parametrize("ending", ["<|im_end|>", ""])
def test_in_a_query_the_special_tokens_of_the_response_are_text_but_for_the_one_that_ends_it(model, ending):
    rendered = model.kit.chat_text(model.processor, TEXT.messages, add_generation_prompt=True)
    expected = model.encode(TEXT, SPELLED, ending=ending)
    if not ending:
        # The policy's own last words cannot be told from what ended them.
        expected = model.encode(TEXT, SPELLED.removesuffix("<|im_end|>"))
    assert model.encode_text(rendered + SPELLED + ending, prompt=rendered).token_ids == expected.token_ids


def test_a_sample_that_is_too_long_is_refused_and_never_cut(folder):
    model = load(folder, max_len=60)
    length = len(model.encode(TEXT, OTHER).token_ids)
    with pytest.raises(UserError) as refused:
        model.encode(TEXT, OTHER * 60)
    assert str(refused.value).startswith("rows.jsonl, line 1: the prompt and the response take ")
    assert "more than --max_len 60" in str(refused.value)
    with pytest.raises(UserError, match="more than --max_len 60"):
        model.encode_text("What? " * 60)
    assert length <= 60


def test_a_checkpoint_without_a_value_head_is_refused(tiny_checkpoint, tmp_path):
    bare = tiny_checkpoint(KIT)
    with pytest.raises(UserError) as refused:
        load(bare, value_head_prefix="reward_head")
    assert str(refused.value) == (
        f"{bare}: this checkpoint has no value head (no weight reward_head.weight); give a trained reward model, or the "
        "name of its head with --value_head_prefix"
    )
    with pytest.raises(UserError, match="no such folder"):
        load(tmp_path / "nothing")


def test_batches_hold_as_many_tokens_as_allowed():
    lengths = [3, 9, 4, 12]
    assert plan_batches(lengths, max_tokens=9, padded=True) == [[3], [1], [2, 0]]
    assert plan_batches(lengths, max_tokens=7, padded=True) == [[3], [1], [2], [0]]
    assert plan_batches(lengths, max_tokens=7, padded=False) == [[3], [1], [2, 0]]
    assert plan_batches(lengths, max_tokens=28, padded=False) == [[3, 1, 2, 0]]
