"""Process reward models outside of training: the scores of a policy's logits, what a response's steps are, and its reward."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.character_kit import CharacterKit
from helpers.conversations import message, picture, row
from helpers.tables import frozen
from helpers.tiny_models import encode, make_actor

from lmm_r1.batch.run import _judges_steps
from lmm_r1.config.generation import BatchConfig, check_batch
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, get_kit
from lmm_r1.lmm_kits.step_tokens import CONFIG_KEY, StepTokens
from lmm_r1.scoring import DEFAULT_JUDGING, StepJudging
from lmm_r1.scoring.response_scores import ProcessRewardScorer
from lmm_r1.scoring.reward_model import ProcessRewardModel

KIT = "qwen2_5_vl"
TEXT = row(message("user", "What is 12 + 34?"))
IMAGE = row(message("user", picture(84, 56), "Which digit is this?"))
RESPONSE = "First, 12.\nThen 34.\n\n  So 46.  "
STEPS = ["First, 12.", "Then 34.", "So 46."]
SETTINGS = {"dtype": "fp32", "max_len": 512, "max_batch_tokens": 2048, "trust_remote_code": False}
JUDGING = StepJudging(step_scores="min", placeholder_token="*", reward_tokens=("+", "-"))


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint(KIT)


@pytest.fixture(scope="module")
def model(folder: Path) -> ProcessRewardModel:
    return ProcessRewardModel(str(folder), judging=JUDGING, **SETTINGS)


def scores_by_hand(folder: Path, asked: Any, steps: list[str]) -> list[float]:
    """The probability of + against - that the policy's own logits give at each placeholder, padded, alone."""
    kit = get_kit(KIT)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    tokenizer = kit.tokenizer_of(processor)
    prompt = encode(kit, processor, asked.messages)
    ids = list(prompt.token_ids)
    for number, step in enumerate(steps):
        ids += tokenizer(f"\n{step}" if number else step, add_special_tokens=False)["input_ids"]
        ids += tokenizer("*", add_special_tokens=False)["input_ids"]
    sequences = torch.tensor([ids])
    with torch.no_grad():
        output = make_actor(folder)(
            sequences, attention_mask=torch.ones_like(sequences), return_output=True, media=[prompt.media]
        )
    plus, minus, mark = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in "+-*")
    logits = output["logits"][0, sequences[0] == mark][:, [plus, minus]]
    assert len(logits) == len(steps)
    return logits.softmax(-1)[:, 0].tolist()


def test_the_score_of_a_step_is_what_the_policys_logits_say_at_its_placeholder(folder, model, monkeypatch):
    samples = [
        model.encode_steps(TEXT, RESPONSE),
        model.encode_steps(IMAGE, "One * and *"),
        model.encode_steps(TEXT, "A."),
    ]
    expected = [
        scores_by_hand(folder, TEXT, STEPS),
        scores_by_hand(folder, IMAGE, ["One", "and"]),
        scores_by_hand(folder, TEXT, ["A."]),
    ]
    assert model.is_packed
    for packed in (True, False):
        monkeypatch.setattr(model._model, "packing_samples", packed)
        found = model.score(samples)
        assert [len(scores) for scores in found] == [3, 2, 1]
        assert sum(found, []) == pytest.approx(sum(expected, []), abs=1e-5)
    # A response without steps is given none, and is not computed.
    assert model.score([model.encode_steps(TEXT, " \n ")]) == [[]]
    mixed = model.score([model.encode_steps(TEXT, ""), samples[2], model.encode_steps(IMAGE, "\n")])
    assert (mixed[0], mixed[1], mixed[2]) == ([], pytest.approx(expected[2], abs=1e-5), [])
    with pytest.raises(UserError, match="tokens, which is more than --max_len 512; raise it"):
        model.encode_steps(TEXT, "word " * 600)


def test_steps_are_what_placeholders_end_or_else_lines():
    tokens = StepTokens.of(
        CharacterKit(), None, placeholder="*", judging=("+", "-"), flags=("--placeholder_token", "--reward_tokens")
    )
    assert tokens.split(RESPONSE) == STEPS
    assert tokens.split("a\nb * c *\n") == ["a\nb", "c"]
    assert tokens.split("") == []
    ids, places = tokens.behind([1, 2], ["a", "b"], tokenize=lambda text: list(text.encode()), end=9)
    assert ids == [1, 2, *b"a*\nb*", 9]
    assert places == [3, 6]


class Judged:
    """A model that gives each response the scores that stand in it."""

    def encode_prompt(self, asked: object) -> None:
        return None

    def encode_steps(self, asked: object, response: str, *, prompt: object) -> list[float]:
        return list(map(float, response.split()))

    def score(self, samples: list[list[float]]) -> list[list[float]]:
        return samples


@pytest.mark.parametrize(
    ("kind", "rewards"),
    [("min", [0.25, 0.0, 0.9]), ("product", [0.09, 0.0, 0.9]), ("last", [0.72, 0.0, 0.9]), ("mean", [0.49, 0.0, 0.9])],
)
def test_a_response_is_rewarded_by_its_least_step_their_product_the_last_or_the_mean(kind, rewards):
    scorer = ProcessRewardScorer.__new__(ProcessRewardScorer)
    scorer._model, scorer._path, scorer._step_scores = Judged(), "m", kind
    completions = [Completion(text=text, num_tokens=1, finish_reason="stop") for text in ("0.5 0.25 0.72", "", "0.9")]
    found = scorer.score(TEXT, completions)
    assert [score.reward for score in found] == pytest.approx(rewards)
    assert found[0].parts == pytest.approx(
        {"steps": 3, "steps_min": 0.25, "steps_product": 0.09, "steps_last": 0.72, "steps_mean": 0.49}
    )
    assert found[1].parts == dict.fromkeys(found[0].parts, 0.0)
    with pytest.raises(UserError, match="m gives a step no finite score"):
        scorer.score(TEXT, [Completion(text="nan", num_tokens=1, finish_reason="stop")])


def config(tmp_path: Path, **flags: object) -> BatchConfig:
    return BatchConfig(data="rows.jsonl", output=tmp_path / "out.jsonl", **{"model": "m"} | flags)


def test_a_checkpoint_is_a_process_reward_model_by_its_config_or_by_flags(folder, tmp_path):
    path = str(folder)
    assert not _judges_steps(config(tmp_path), path)
    assert _judges_steps(config(tmp_path, placeholder_token="*"), path)
    with pytest.raises(UserError, match="--step_scores last: .* is not a process reward model by its config"):
        _judges_steps(config(tmp_path, step_scores="last"), path)
    with pytest.raises(UserError, match="--normalize_reward: .* is a process reward model"):
        _judges_steps(config(tmp_path, placeholder_token="*", normalize_reward=True), path)
    with pytest.raises(UserError, match="its config does not say which tokens judge steps; give --placeholder_token"):
        ProcessRewardModel(path, judging=replace(JUDGING, reward_tokens=()), **SETTINGS)


def test_a_value_head_says_that_a_checkpoint_judges_whole_responses_now(folder):
    checkpoint = Checkpoint(str(folder))
    setattr(checkpoint.config, CONFIG_KEY, {"placeholder_token": "*", "reward_tokens": ["+", "-"]})
    assert DEFAULT_JUDGING.is_of(checkpoint, of_whole=[])
    checkpoint.config.value_head_prefix = "score"
    assert not DEFAULT_JUDGING.is_of(checkpoint, of_whole=[])


@pytest.mark.parametrize(
    ("flags", "said"),
    frozen("scoring/process_reward_model", "flags_of_steps_without_a_process_reward_model_are_refused"),
)
def test_flags_of_steps_without_a_process_reward_model_are_refused(flags, said, tmp_path):
    with pytest.raises(UserError, match=said):
        check_batch(config(tmp_path, **flags))
