"""Flags of episodes, guessed tokens and CUDA graphs outside of training: refused by name if they would be ignored."""

from dataclasses import fields
from pathlib import Path

import pytest

from lmm_r1.config import PPOConfig, evaluate, generation
from lmm_r1.config.generation import EPISODE_FLAGS, episode_limits, reward_part
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.config.shared import Speculation, SpeculationFlags, ThoughtConfig
from lmm_r1.errors import UserError

COMMANDS = {
    "evaluate": (evaluate.EvaluateConfig, evaluate.check, {"checkpoints": ("a=b",), "files": ("a=b",)}),
    "batch_inference": (generation.BatchConfig, generation.check_batch, {"model": "m", "data": "d"}),
    "interactive_chat": (generation.ChatConfig, generation.check_chat, {"model": "m"}),
}
SAMPLED = {"n_samples": 2, "temperature": 1.0, "selected": Path("selected.jsonl")}


WITHOUT_VLLM = [
    ("interactive_chat", "backend", "transformers"),
    ("evaluate", "backend", "transformers"),
    ("batch_inference", "eval_task", "generate"),
    ("batch_inference", "eval_task", "rm"),
]


def checked(command: str, folder: Path, **changes: object) -> generation.EpisodeFlags:
    config_class, check, given = COMMANDS[command]
    output = {} if command == "interactive_chat" else {"output": folder / "out.json"}
    config = config_class(**given, **output, **changes)
    check(config)
    return config


def refusal(command: str, folder: Path, **changes: object) -> str:
    with pytest.raises(UserError) as refused:
        checked(command, folder, **changes)
    return str(refused.value)


@pytest.mark.parametrize(("command", "flag", "value"), WITHOUT_VLLM)
def test_switching_cuda_graphs_off_is_refused_where_nothing_has_them(command, flag, value, tmp_path):
    checked(command, tmp_path, enforce_eager=True)
    checked(command, tmp_path, **{flag: value})
    told = refusal(command, tmp_path, enforce_eager=True, **{flag: value})
    assert told.startswith(f"--enforce_eager requires that --{flag} is ")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"agent_max_turns": 2}, "--agent_max_turns 2 has no effect unless --agent is set"),
        ({"agent_options": "{}"}, "--agent_options {} has no effect unless --agent is set"),
        ({"agent": "crop", "agent_max_turns": 0}, "--agent_max_turns 0 must be at least 1"),
        ({"agent": "crop", "agent_max_images": -1}, "--agent_max_images -1 must be at least 0"),
        ({"agent": "crop", "agent_answer_s": 0.0}, "--agent_answer_s 0 must be above 0"),
        ({"agent": "crop", "agent_options": "[1]"}, "--agent_options [1] must be a JSON object"),
        ({"agent": "crop", "agent_thought": ThoughtConfig(continuations=-1)}, "--agent_thought.continuations -1 must"),
        ({"agent_thought": ThoughtConfig(max_tokens=9)}, "--agent_thought.max_tokens 9 has no effect unless --agent"),
    ],
)
def test_a_flag_of_episodes_that_makes_no_sense_is_refused(command, changes, sentence, tmp_path):
    assert refusal(command, tmp_path, **changes).startswith(sentence)


@pytest.mark.parametrize(
    ("command", "changes", "needed"),
    [
        ("evaluate", {"backend": "transformers"}, "--backend is vllm"),
        ("interactive_chat", {"backend": "transformers"}, "--backend is vllm"),
        ("batch_inference", {"eval_task": "generate"}, "--eval_task is generate_vllm"),
        ("batch_inference", {"eval_task": "rm"}, "--eval_task is generate_vllm"),
        ("batch_inference", {"reward_model": "r"}, "--reward_model is not set"),
        ("batch_inference", {"select": "dpo_pairs", **SAMPLED}, "--select is not dpo_pairs"),
        ("evaluate", {"endpoint": "http://127.0.0.1:1/v1", "model": ("m",)}, "--endpoint is not set"),
    ],
)
def test_what_plays_no_episodes_is_told_with_what_does(command, changes, needed, tmp_path):
    assert refusal(command, tmp_path, agent="crop", **changes).startswith(f"--agent crop requires that {needed}")


def test_flags_that_need_episodes_ask_for_them(tmp_path):
    said = refusal("evaluate", tmp_path, reward=("agent:solved",))
    assert said == "--reward agent:solved judges by an environment's reward; give --agent, too"
    config = evaluate.EvaluateConfig(compare=("a", "b"), agent="crop")
    with pytest.raises(UserError, match="--agent crop requires that --compare is not set"):
        evaluate.check(config)


def test_limits_are_those_of_the_flags_and_defaults_those_of_training():
    config = generation.ChatConfig(model="m", agent="crop", agent_max_turns=2, agent_options="{}")
    assert episode_limits(config) == AgentConfig(max_turns=2, options="{}", overturn="keep")


def test_every_limit_of_training_has_a_flag_here():
    # What becomes of an episode that goes too far is a question of learning, and so is what branches have in common.
    names = {field.name for field in fields(AgentConfig)}
    names -= {"overturn", "overturn_penalty", "branches", "branch_turn"}
    assert {f"agent_{name}" for name in names} == set(EPISODE_FLAGS) - {"agent"}


def test_a_part_of_the_reward_is_named_behind_the_colon():
    assert [reward_part(name) for name in ("agent:solved", "agent", "math:agent", "list:unordered")] == [
        "solved", None, None, None,
    ]  # fmt: skip


def test_tokens_are_guessed_only_where_that_is_asked_for():
    assert PPOConfig().vllm.speculation is None
    assert SpeculationFlags(speculative_tokens=3).speculation == Speculation(tokens=3)


@pytest.mark.parametrize(("command", "flag", "value"), WITHOUT_VLLM[1:])
def test_what_generates_without_vllm_is_not_asked_to_guess(command, flag, value, tmp_path):
    assert checked(command, tmp_path, speculative_tokens=3).speculation == Speculation(tokens=3)
    assert checked(command, tmp_path, **{flag: value}).speculation is None
    told = refusal(command, tmp_path, speculative_tokens=3, **{flag: value})
    assert told.startswith(f"--speculative_tokens 3 requires that --{flag} is ")


def test_an_endpoint_guesses_by_itself(tmp_path):
    served = {"checkpoints": (), "endpoint": "http://127.0.0.1:8000/v1", "model": ("m",), "files": ("b=rows.jsonl",)}
    config = evaluate.EvaluateConfig(**served, output=tmp_path / "scores.json", speculative_tokens=3)
    with pytest.raises(
        UserError, match="^--speculative_tokens 3 requires that .*: an endpoint has an engine of its own"
    ):
        evaluate.check(config)


@pytest.mark.parametrize("tokens", [-1, 129])
def test_a_number_of_tokens_that_vllm_cannot_guess_is_refused(tokens, tmp_path):
    said = refusal("batch_inference", tmp_path, speculative_tokens=tokens)
    assert said == f"--speculative_tokens {tokens} must be at least 0 and at most 128"
