"""Mini-o3's and verl's settings of several turns, one by one."""

import json

import pytest

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve_ppo
from lmm_r1.config.rewards import part_weights
from lmm_r1.errors import UserError
from lmm_r1.tools.migrate import convert
from lmm_r1.tools.migrate.verl import VERL

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def converted(values: dict[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    base = {"algorithm.adv_estimator": "grpo", "worker.rollout.n": 8, "data.val_files": "v", "trainer.val_freq": 5}
    base |= {"worker.actor.model.model_path": "m", "data.train_files": "d"}
    conversion = convert(base | values, VERL)
    # Whatever the settings are, the trainer takes what is made of them.
    resolve_ppo(dotted.replace(PPOConfig(), dict(conversion.flags)))
    return dict(conversion.flags), {note.subject: note.text for note in conversion.notes}


def crops(rollout: dict[str, object] | None = None, **more: object) -> tuple[dict[str, object], dict[str, str]]:
    """A run with Mini-o3's rollout; a dot in a keyword is written as two underscores."""
    values: dict[str, object] = {f"{ROLLOUT}.name": "vllm_multi_turn_tool_call"}
    values |= {f"{ROLLOUT}.{name}": value for name, value in (rollout or {}).items()}
    return converted(values | {name.replace("__", "."): value for name, value in more.items()})


def test_crops_without_further_settings_have_mini_o3s_defaults():
    flags, _ = crops()
    agent = {name: value for name, value in flags.items() if name.startswith("agent.")}
    assert json.loads(str(agent.pop("agent.options"))) == {
        "coordinates": "absolute",
        "edges": "clamp",
        "rounding": "down",
        "min_pixels": 3136,
        "max_pixels": 12845056,
    }
    assert agent == {"agent.max_turns": 1, "agent.max_images": 0, "agent.overturn": "keep"}
    assert (flags["data.max_len"], flags["rollout.max_new_tokens"]) == (32768, 512)


def test_boxes_of_crops_are_in_the_coordinates_that_the_run_has():
    flags, notes = crops({"use_relative_coordinates": True}, data__min_pixels=40000, data__max_pixels=1000000)
    assert json.loads(str(flags["agent.options"])) == {
        "coordinates": "relative",
        "edges": "clamp",
        "rounding": "down",
        "min_pixels": 40000,
        "max_pixels": 1000000,
    }
    assert "--data.image_dir" in notes["data.train_files"]


def test_evaluation_with_other_limits_than_training_is_told_with_the_command_that_has_them():
    limits = {"max_generation_round": 6, "limit_mm_per_prompt": {"image": 12}}
    # One round there means those of training.
    _, notes = crops(limits | {"val_max_generation_round": 1})
    assert f"{ROLLOUT}.val_max_generation_round" not in notes
    _, notes = crops(limits | {"val_max_generation_round": 6, "val_limit_mm_per_prompt": {"image": 12}})
    assert not any("val_" in name for name in notes)
    _, notes = crops(limits | {"val_max_generation_round": 32, "val_limit_mm_per_prompt": {"image": 33}})
    assert "--agent.max_turns 6" in notes[f"{ROLLOUT}.val_max_generation_round"]
    assert "--agent_max_turns 32" in notes[f"{ROLLOUT}.val_max_generation_round"]
    assert "--agent.max_images 11" in notes[f"{ROLLOUT}.val_limit_mm_per_prompt"]
    assert "--agent_max_images 32" in notes[f"{ROLLOUT}.val_limit_mm_per_prompt"]


def test_passes_of_dynamic_batches_hold_whole_episodes():
    micro = {"worker.actor.micro_batch_size_per_device_for_update": 2, "worker.actor.dynamic_batching": True}
    lengths = {"data.max_prompt_length": 1024, "data.max_response_length": 2048}
    episodes = {f"{ROLLOUT}.name": "vllm_multi_turn_tool_call", f"{ROLLOUT}.max_total_response_length": 10000}
    flags, _ = converted(micro | lengths)
    assert (flags["data.max_len"], flags["train.max_tokens_per_gpu"]) == (3072, 6144)
    flags, notes = converted(micro | lengths | episodes)
    assert (flags["data.max_len"], flags["train.max_tokens_per_gpu"]) == (10000, 20000)
    # Nothing tells the sum that holds for single responses.
    assert "data.max_prompt_length, data.max_response_length" not in notes


def test_a_reward_of_mini_o3_is_the_judges_with_weights_of_tools_and_format():
    flags, notes = crops(
        data__acc_reward_weight=2.0,
        data__format_reward_weight=0.25,
        data__tool_call_penalty=0.1,
        data__use_tool_reward_weight=0.5,
    )
    # (1 - 0.1) x 2 = 1.8 for a right answer with a crop: 2 of the judge, -0.2 of the product.
    weights = {"accuracy * used_tool": -0.2, "turn_format": 0.25, "used_tool": 0.5}
    assert json.loads(str(flags["reward.part_weights"])) == weights
    config = dotted.replace(PPOConfig(), {"reward.part_weights": flags["reward.part_weights"]})
    assert [weight.at(1).weight for weight in part_weights(config.reward)] == [-0.2, 0.25, 0.5]
    judge = notes["data.gpt_general_qa_reward_fn"]
    assert "serve_verifier llm_judge --accuracy-weight 2 --format-weight 0" in judge


def test_multiple_choice_of_mini_o3_is_judged_by_a_rule_where_no_judge_stands_above_it():
    rule: dict[str, object] = {"data__general_qa_reward_fn": "general_qa_tool_mc"}
    flags, notes = crops(**rule)
    assert flags["reward.remote_url"] == "http://127.0.0.1:5000/get_reward"
    assert notes["data.general_qa_reward_fn"].startswith("it has no effect")
    flags, notes = crops(**rule, reward_model__use_hybrid_reward_manager=False)
    assert flags["reward.remote_url"] == "choice:accuracy_weight=1,format_weight=0"
    assert "data.general_qa_reward_fn" not in notes
    flags, _ = crops(**rule, custom_reward_function__path="mine.py")
    assert flags["reward.remote_url"] == "mine.py:compute_score"
    assert "reward.part_weights" not in flags


def test_settings_of_episodes_are_of_no_use_to_single_responses():
    flags, notes = converted({f"{ROLLOUT}.max_generation_round": 6, f"{ACTOR}.ignore_exceed": True})
    assert not any(name.startswith(("agent.", "train.agent")) for name in flags)
    assert notes[f"{ROLLOUT}.max_generation_round"] == notes[f"{ACTOR}.ignore_exceed"]
    assert notes[f"{ACTOR}.ignore_exceed"].startswith("it has no effect")
    _, notes = converted({f"{ROLLOUT}.max_generation_round": 1, f"{ACTOR}.ignore_exceed": False})
    assert not any(name.startswith((ROLLOUT, ACTOR)) for name in notes)


def test_images_that_are_no_number_are_refused():
    with pytest.raises(UserError, match="limit_mm_per_prompt: image is 'many'; it must be a whole number"):
        crops({"limit_mm_per_prompt": {"image": "many"}})
