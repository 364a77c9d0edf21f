"""`--reward`, with verifiers described by their flags, and `--reward.part_weights`: what they make, and what is refused."""

import json

import pytest
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.cli.arguments import YamlError, parse_settings
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import part_weights, verifier_from
from lmm_r1.errors import UserError
from remote_rm.llm_judge_verifier import LlmJudge
from remote_rm.verifier import Item


def weights_at(value: object, *steps: int) -> list[float]:
    (weight,) = part_weights(RewardConfig(part_weights=json.dumps({"format": value})))
    return [round(weight.at(step).weight, 6) for step in steps]


def test_a_constant_holds_in_every_step():
    assert weights_at(0.5, 1, 2, 10**9) == [0.5] * 3
    assert weights_at({"weight": -1}, 1, 7) == [-1.0] * 2
    assert part_weights(RewardConfig()) == ()


@pytest.mark.parametrize(
    ("shape", "weights"),
    [
        # 4 steps from 0.8: a quarter of the way in each; (1 - cos(pi / 4)) / 2 = 0.146447.
        (None, [0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),
        ("linear", [0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),
        ("cosine", [0.8, 0.682843, 0.4, 0.117157, 0.0, 0.0]),
        ("step", [0.8, 0.8, 0.8, 0.8, 0.0, 0.0]),
    ],
)
def test_a_schedule_begins_with_the_first_step_and_has_ended_behind_its_last(shape, weights):
    schedule = {"from": 0.8, "to": 0, "steps": 4} | ({} if shape is None else {"shape": shape})
    assert weights_at(schedule, 1, 2, 3, 4, 5, 100) == weights


def test_a_weight_depends_on_the_step_alone_so_that_a_resumed_run_goes_on_with_it():
    config = RewardConfig(part_weights='{"a": {"from": 0, "to": 1, "steps": 10}}')
    first, resumed = part_weights(config), part_weights(config)
    assert [one.at(6) for one in first] == [one.at(6) for one in resumed]
    assert first[0].at(6).weight == 0.5


def test_a_product_of_parts_is_one_part_and_may_have_a_most():
    right, calls = part_weights(
        RewardConfig(part_weights='{"accuracy * used_tool": 0.5, "tool_calls": {"weight": 0.2, "at_most": 5}}')
    )
    assert (right.factors, right.at(1).metric) == (("accuracy", "used_tool"), "part_weight/accuracy x used_tool")
    earned = [right.at(1).earned({"accuracy": acc, "used_tool": used}) for acc in (0.0, 1.0) for used in (0.0, 1.0)]
    assert earned == [0.0, 0.0, 0.0, 0.5]
    assert [calls.at(1).earned({"tool_calls": count}) for count in (0.0, 3.0, 9.0)] == pytest.approx([0.0, 0.6, 1.0])


@pytest.mark.parametrize(("text", "said"), table("config/part_weights", "what_is_no_weight_is_refused_with_its_place"))
def test_what_is_no_weight_is_refused_with_its_place(text, said):
    with pytest.raises(UserError, match=f"^--reward.part_weights .*{said}"):
        part_weights(RewardConfig(part_weights=text))


FLAGS = table("config/part_weights", "flags")


def test_weights_are_read_before_anything_starts_and_need_a_source_of_parts():
    served = FLAGS | {"reward.remote_url": "http://127.0.0.1:5000/get_reward"}
    resolve(dotted.replace(PPOConfig(), served | {"reward.part_weights": '{"format": 0.5}'}))
    with pytest.raises(UserError, match="--reward.part_weights \\[\\] must be a JSON object"):
        resolve(dotted.replace(PPOConfig(), served | {"reward.part_weights": "[]"}))


def test_a_yaml_file_may_hold_them_as_a_mapping_or_as_text():
    known = dotted.leaf_types(PPOConfig)
    nested = """
reward:
  part_weights:
    format: 0.5
    accuracy * used_tool: 1e-1
    tool_calls: {from: 0.2, to: 0, steps: 100, shape: cosine}
"""
    expected = {
        "format": 0.5,
        "accuracy * used_tool": 0.1,
        "tool_calls": {"from": 0.2, "to": 0, "steps": 100, "shape": "cosine"},
    }
    found = parse_settings(nested, known, source="run.yaml")
    assert json.loads(found["reward.part_weights"]) == expected
    text = f"reward.part_weights: '{json.dumps(expected)}'"
    assert json.loads(parse_settings(text, known, source="run.yaml")["reward.part_weights"]) == expected
    with pytest.raises(YamlError, match="^run.yaml:2: reward.part_weights names a key twice$"):
        parse_settings("reward.part_weights:\n  {a: 1, a: 2}", known, source="run.yaml")


@pytest.mark.parametrize(
    ("spec", "response", "label", "score", "reward"),
    [
        ("number", "<answer>3</answer>", "3", 1.0, None),
        ("list", "<answer>2, 1</answer>", "1, 2", 0.0, None),
        ("exact", "<answer>Red</answer>", "red", 0.0, None),
        # Switches and flags with values follow a colon.
        ("list:unordered", "<answer>2, 1</answer>", "1, 2", 1.0, None),
        ("exact:ignore_case", "<answer>Red</answer>", "red", 1.0, None),
        ("math:accuracy_weight=2, format_weight=0.25", "<think>x</think><answer>4</answer>", "4", 1.0, 2.25),
        ("list:unordered,format_weight=0", "<think>x</think><answer>4</answer>", "4", 1.0, 1.0),
        ("composition:math=2,format=0.25", "<think>x</think><answer>4</answer>", "3", 0.0, 0.25),
        ("math=2,format=0.25", "<think>x</think><answer>4</answer>", "3", 0.0, 0.25),
        # A selected part judges the labels that name it.
        ("composition:select.choice,select.number", "<answer>(B)</answer>", "choice: B", 1.0, None),
        ("composition:select.choice,select.number", "<answer>7</answer>", "number: 7", 1.0, None),
    ],
)
def test_a_spec_is_a_verifier_with_its_settings(spec, response, label, score, reward):
    found = verifier_from(spec).score(Item(prompt="", response=response, label=label))
    assert found.score == score
    assert reward is None or found.reward == reward


def test_a_judge_is_described_by_its_flags():
    spec = (
        'llm_judge:judge_url=http://127.0.0.1:8000/v1,judge_model=org/m,judge_body={"a": 1, "b": [2,true]},'
        "judge_rule=choice,judge_concurrency=7"
    )
    assert verifier_from(spec) == LlmJudge(
        judge_url="http://127.0.0.1:8000/v1",
        judge_model="org/m",
        judge_body='{"a": 1, "b": [2,true]}',
        judge_rule="choice",
        judge_concurrency=7,
    )


@pytest.mark.parametrize(("spec", "sentence"), table("config/verifier_spec", "what_is_unknown_is_said_with_the_flag"))
def test_what_is_unknown_is_said_with_the_flag(spec, sentence):
    with pytest.raises(UserError) as refused:
        verifier_from(spec)
    assert str(refused.value).startswith(sentence)
