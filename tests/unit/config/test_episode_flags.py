"""Flags of episodes outside of training: refused by name where they would be ignored."""

from dataclasses import fields
from pathlib import Path

import pytest

from lmm_r1.config import evaluate, generation
from lmm_r1.config.generation import EPISODE_FLAGS, episode_limits, reward_part
from lmm_r1.config.ppo import AgentConfig, ThoughtConfig
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit

COMMANDS = {
    "evaluate": (evaluate.EvaluateConfig, evaluate.check, {"checkpoints": ("a=b",), "files": ("a=b",)}),
    "batch_inference": (generation.BatchConfig, generation.check_batch, {"model": "m", "data": "d"}),
    "interactive_chat": (generation.ChatConfig, generation.check_chat, {"model": "m"}),
}
SAMPLED = {"n_samples": 2, "temperature": 1.0, "selected": Path("selected.jsonl")}


def refusal(command: str, folder: Path, **changes: object) -> str:
    config, check, given = COMMANDS[command]
    output = {} if command == "interactive_chat" else {"output": folder / "out.json"}
    with pytest.raises(UserError) as refused:
        check(config(**given, **output, **changes))
    return str(refused.value)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"agent_max_turns": 2}, "--agent_max_turns 2: it is for episodes; give --agent, too"),
        ({"agent_options": "{}"}, "--agent_options {}: it is for episodes; give --agent, too"),
        ({"agent": "crop", "agent_max_turns": 0}, "--agent_max_turns 0 must be at least 1"),
        ({"agent": "crop", "agent_max_images": -1}, "--agent_max_images -1 must be at least 0"),
        ({"agent": "crop", "agent_answer_s": 0.0}, "--agent_answer_s 0 must be above 0"),
        ({"agent": "crop", "agent_options": "[1]"}, "--agent_options [1] must be a JSON object"),
        ({"agent": "crop", "agent_last_turn_regex": "("}, "--agent_last_turn_regex ( is no regular expression"),
        (
            {"agent": "crop", "agent_thought": ThoughtConfig(continuations=-1)},
            "--agent_thought.continuations -1 must be",
        ),
        (
            {"agent_thought": ThoughtConfig(max_tokens=9)},
            "--agent_thought.max_tokens 9: it is for episodes; give --agent",
        ),
    ],
)
def test_a_flag_of_episodes_that_makes_no_sense_is_refused(command, changes, sentence, tmp_path):
    assert refusal(command, tmp_path, **changes).startswith(sentence)


@pytest.mark.parametrize(
    ("command", "changes", "sentence"),
    [
        (
            "evaluate",
            {"backend": "transformers"},
            "--agent crop with --backend transformers: only vLLM plays episodes",
        ),
        ("interactive_chat", {"backend": "transformers"}, "--agent crop with --backend transformers: "),
        ("batch_inference", {"eval_task": "generate"}, "--agent crop with --eval_task generate: "),
        ("batch_inference", {"eval_task": "rm"}, "--agent crop with --eval_task rm: "),
        ("batch_inference", {"reward_model": "r"}, "--agent crop with --reward_model r: a reward model scores single"),
        ("batch_inference", {"select": "dpo_pairs", **SAMPLED}, "--agent crop with --select dpo_pairs: pairs are of"),
        (
            "evaluate",
            {"endpoint": "http://127.0.0.1:1/v1", "model": ("m",)},
            "--agent crop with --endpoint http://127.0.0.1:1/v1: episodes are played on an engine in this process",
        ),
    ],
)
def test_what_plays_no_episodes_is_told_with_what_does(command, changes, sentence, tmp_path):
    assert refusal(command, tmp_path, agent="crop", **changes).startswith(sentence)


def test_flags_that_need_episodes_ask_for_them(tmp_path):
    said = refusal("evaluate", tmp_path, verifiers=("agent:solved",))
    assert said == "--verifiers agent:solved judges by an environment's reward; give --agent, too"
    said = refusal("interactive_chat", tmp_path, agent_pictures=tmp_path)
    assert said == f"--agent_pictures {tmp_path}: it is for episodes; give --agent, too"
    config = evaluate.EvaluateConfig(compare=("a", "b"), agent="crop")
    with pytest.raises(UserError, match="--compare and --agent are both given"):
        evaluate.check(config)


def test_limits_are_those_of_the_flags_and_defaults_those_of_training():
    config = generation.ChatConfig(model="m", agent="crop", agent_max_turns=2, agent_options="{}")
    assert episode_limits(config) == AgentConfig(max_turns=2, options="{}", overturn="keep")


def test_every_limit_of_training_has_a_flag_here():
    # What becomes of an episode that goes too far is a question of learning, and so is what branches have in common.
    names = {field.name for field in fields(AgentConfig)}
    names -= {"overturn", "overturn_penalty", "branches", "branch_turn", "prefix_caching"}
    assert {f"agent_{name}" for name in names} == set(EPISODE_FLAGS) - {"agent"}


def test_a_part_of_the_reward_is_named_behind_the_colon():
    assert [reward_part(name) for name in ("agent:solved", "agent", "math:agent", "list:unordered")] == [
        "solved", None, None, None,
    ]  # fmt: skip
