"""The flags of guessed tokens: the same for training, evaluation and batch inference."""

from pathlib import Path
from typing import Any

import pytest

from lmm_r1.config import PPOConfig, evaluate, generation, shared
from lmm_r1.config.evaluate import EvaluateConfig
from lmm_r1.config.generation import BatchConfig
from lmm_r1.config.shared import Speculation, SpeculationFlags, check_speculation
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


def check(command: str, folder: Path, **flags: Any) -> Speculation | None:
    if command == "evaluate":
        config = EvaluateConfig(checkpoints=("a=m",), files=("b=rows.jsonl",), output=folder / "scores.json", **flags)
        evaluate.check(config)
    else:
        config = BatchConfig(model="m", data="rows.jsonl", output=folder / "out.jsonl", **flags)
        generation.check_batch(config)
    return config.speculation


def test_tokens_are_guessed_only_where_that_is_asked_for():
    assert PPOConfig().vllm.speculation is None
    assert SpeculationFlags(speculative_tokens=3).speculation == Speculation(method="ngram", tokens=3)


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("evaluate", "backend", "transformers"),
        ("batch_inference", "eval_task", "generate"),
        ("batch_inference", "eval_task", "rm"),
    ],
)
def test_what_generates_without_vllm_is_not_asked_to_guess(command, flag, value, tmp_path):
    assert check(command, tmp_path, speculative_tokens=3) == Speculation(method="ngram", tokens=3)
    assert check(command, tmp_path, **{flag: value}) is None
    said = f"^--speculative_tokens 3 has vLLM guess tokens, and --{flag} {value} generates without it; leave it out$"
    with pytest.raises(UserError, match=said):
        check(command, tmp_path, speculative_tokens=3, **{flag: value})


def test_an_endpoint_guesses_by_itself(tmp_path):
    with pytest.raises(UserError, match="^--speculative_tokens 3: an endpoint has an engine of its own"):
        evaluate.check(
            EvaluateConfig(
                endpoint="http://127.0.0.1:8000/v1",
                model=("m",),
                files=("b=rows.jsonl",),
                output=tmp_path / "scores.json",
                speculative_tokens=3,
            )
        )


@pytest.mark.parametrize("tokens", [-1, 129])
def test_a_number_of_tokens_that_vllm_cannot_guess_is_refused(tokens):
    with pytest.raises(UserError, match=f"^--vllm.speculative_tokens {tokens} must be between 0, .* most, 128$"):
        check_speculation(SpeculationFlags(speculative_tokens=tokens), prefix="vllm.")


def test_a_method_without_tokens_or_its_package_is_refused(monkeypatch):
    with pytest.raises(UserError, match="^--vllm.speculative_method suffix .*; give --vllm.speculative_tokens, too$"):
        check_speculation(SpeculationFlags(speculative_method="suffix"), prefix="vllm.")
    asked = SpeculationFlags(speculative_method="suffix", speculative_tokens=8)
    monkeypatch.setattr(shared, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package arctic-inference, .*take --speculative_method ngram$"):
        check_speculation(asked)
    monkeypatch.setattr(shared, "find_spec", lambda name: name)
    check_speculation(asked)
