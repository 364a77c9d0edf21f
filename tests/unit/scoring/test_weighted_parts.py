"""Rewards with weighted parts, worked out by hand."""

import json

import pytest

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import WeightedPart, part_weights
from lmm_r1.errors import UserError
from lmm_r1.scoring import weighted
from remote_rm.verifier import Score

# Right, badly formatted, by a tool: the verifier counts accuracy at 1 and the format at 0.5.
GIVEN = Score(reward=1.0, score=1.0, parts={"accuracy": 1.0, "format": 0.0, "used_tool": 1.0, "tool_calls": 3.0})


def in_force(weights: dict[str, object], *, step: int = 1) -> list[WeightedPart]:
    return [weight.at(step) for weight in part_weights(RewardConfig(part_weights=json.dumps(weights)))]


def test_weighted_parts_are_added_to_the_reward_and_score_and_parts_stay():
    found = weighted(GIVEN, in_force({"tool_calls": -0.1, "format": 2.0}), location="line 1")
    assert found.reward == pytest.approx(0.7)
    assert (found.score, found.parts) == (1.0, GIVEN.parts)


def test_the_weight_of_a_part_that_an_environment_has_paid_takes_the_place_of_its_1():
    paid = Score(reward=1.0 + 0.25, score=1.0, parts={"accuracy": 1.0, "step": 0.25})
    for weight, reward in ((1.0, 1.25), (0.0, 1.0), (2.0, 1.5)):
        assert weighted(paid, in_force({"step": weight}), paid=("step",), location="line 1").reward == reward
    # What the scorer has in its reward stays there, and a product is a part of its own.
    assert weighted(paid, in_force({"accuracy": 1.0}), paid=("step",), location="line 1").reward == 2.25
    assert weighted(paid, in_force({"accuracy * step": 2.0}), paid=("step",), location="line 1").reward == 1.75


@pytest.mark.parametrize(("right", "used", "reward"), [(1, 1, 0.9 + 0.2), (1, 0, 1.0), (0, 1, 0.2), (0, 0, 0.0)])
def test_the_reward_of_mini_o3_can_be_told(right, used, reward):
    """(1 - p [tool]) accuracy + w_tool [tool], with p 0.1 and w_tool 0.2."""
    given = Score(reward=float(right), score=float(right), parts={"accuracy": float(right), "used_tool": float(used)})
    weights = in_force({"accuracy * used_tool": -0.1, "used_tool": 0.2})
    assert weighted(given, weights, location="line 1").reward == pytest.approx(reward)


def test_a_schedule_counts_as_it_stands_in_the_step():
    schedule = {"tool_calls": {"from": 0.2, "to": 0.0, "steps": 2}}
    rewards = [weighted(GIVEN, in_force(schedule, step=step), location="line 1").reward for step in (1, 2, 3, 4)]
    assert rewards == pytest.approx([1.6, 1.3, 1.0, 1.0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("formt", "names formt, but the parts .* are: accuracy, format, tool_calls, used_tool; did you mean format"),
        ("format * zoom", "names zoom, but the parts"),
    ],
)
def test_a_part_that_there_is_not_is_refused_with_those_that_there_are(name, said):
    with pytest.raises(UserError, match=f"^rows.jsonl, line 4: --reward.part_weights {said}"):
        weighted(GIVEN, in_force({name: 0.0}), location="rows.jsonl, line 4")
