"""Advantages of every estimator: hand-computed, none where rewards are equal, and OpenRLHF's on all others."""

import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers.rl_steps import StepParts, sample
from helpers.samples import generated_sample
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.config.ppo import EstimatorName
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.host.strategy import to_openrlhf_args
from lmm_r1.models.packed.packing import stacked
from lmm_r1.rl.advantages import (
    ESTIMATORS,
    Estimate,
    RewardedRollout,
    discounted_returns,
    generalized_advantages,
    group_deviations,
    whitened,
)
from lmm_r1.rl.samples import TrainingSample

NAMES = typing.get_args(EstimatorName)
# OpenRLHF's own.
UPSTREAM = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
# The rewards of two groups. The third group is 1, 0, 0.5 and a sample that does not count: its mean is 0.5.
PAIR, THREE = [0.1, 0.9], [1 / 3, 1 / 3, 1.0]
HALF_ROOT, THIRD_ROOT = 1 / math.sqrt(2), 1 / math.sqrt(3)


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """What an estimator gives for these groups, and how its advantages depend on the rewards."""

    pair: list[float]
    three: list[float]
    uncounted: list[float] | None
    """None if samples are not compared."""
    by_group: bool = True
    """Whether each sample is compared with its own group only."""
    whitened: bool = False
    doubles: bool = False
    """Whether advantages double if the rewards do."""


BY_HAND = {
    "gae": ByHand(pair=PAIR, three=THREE, uncounted=None, whitened=True),
    "reinforce": ByHand(pair=PAIR, three=THREE, uncounted=None, whitened=True),
    # Each against the mean of the others: 0.9; 2/3 and 1/3; 0.25, 0.75 and 0.5.
    "rloo": ByHand(pair=[-0.8, 0.8], three=[-1 / 3, -1 / 3, 2 / 3], uncounted=[0.75, -0.75, 0.0], doubles=True),
    # Against the mean: 0.5; 5/9; 0.5.
    "reinforce_baseline": ByHand(
        pair=[-0.4, 0.4], three=[-2 / 9, -2 / 9, 4 / 9], uncounted=[0.5, -0.5, 0.0], whitened=True
    ),
    "dr_grpo": ByHand(pair=[-0.4, 0.4], three=[-2 / 9, -2 / 9, 4 / 9], uncounted=[0.5, -0.5, 0.0], doubles=True),
    # Deviations: 0.8 / sqrt(2); sqrt((4 + 4 + 16) / 81 / 2) = 2 sqrt(3) / 9; sqrt(0.5 / 2) = 0.5.
    "group_norm": ByHand(
        pair=[-HALF_ROOT, HALF_ROOT], three=[-THIRD_ROOT, -THIRD_ROOT, 2 * THIRD_ROOT], uncounted=[1.0, -1.0, 0.0]
    ),
    # Against the batch's mean: here the one group is the batch.
    "flash_reinforce": ByHand(
        pair=[-0.4, 0.4], three=[-2 / 9, -2 / 9, 4 / 9], uncounted=[0.5, -0.5, 0.0], by_group=False, doubles=True
    ),
    # Against the greedy response, whose reward is the group's mean here.
    "remax": ByHand(
        pair=[-0.4, 0.4], three=[-2 / 9, -2 / 9, 4 / 9], uncounted=[0.5, -0.5, 0.0], by_group=False, doubles=True
    ),
}
COMPARING = [name for name, case in BY_HAND.items() if case.uncounted is not None]


def single(*rewards: float) -> torch.Tensor:
    """One group's rewards as they come: in single precision."""
    return torch.tensor([rewards], dtype=torch.float)


def estimate(rewards: torch.Tensor, *, estimator: str, **settings: object) -> Estimate:
    """The estimate of rewards (G, n) of responses of one token each, whose values are 0, in one pass."""
    count = rewards.numel()
    zeros = torch.zeros(count, 1, dtype=torch.double)
    plain = {
        "mask": torch.ones(count, 1, dtype=torch.long),
        "kl": zeros,
        "values": zeros,
        "kl_coef": 0.0,
        "gamma": 1.0,
        "lambd": 1.0,
        "divide": True,
    }
    plain["greedy"] = rewards.double().mean(dim=-1, keepdim=True)
    rollout = RewardedRollout(rewards=rewards.double(), **{**plain, **settings})
    return ESTIMATORS[estimator](rollout)


def shaped_rewards(rewards: torch.Tensor, *, estimator: str, **settings: object) -> torch.Tensor:
    """Each sample's reward (G, n) as its tokens get it: against its group's or its batch's."""
    found = estimate(rewards, estimator=estimator, **settings).token_rewards
    return found.view(rewards.shape)


@pytest.mark.parametrize("estimator", NAMES)
def test_rewards_are_shaped_as_by_hand(estimator):
    case = BY_HAND[estimator]
    for rewards, expected in ((PAIR, case.pair), (THREE, case.three)):
        (shaped,) = shaped_rewards(single(*rewards), estimator=estimator).tolist()
        assert shaped == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("estimator", COMPARING)
@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, 0.0, -7.7, 1e-3, 9.9e5])
def test_equal_rewards_have_no_advantage(estimator, reward):
    for size in range(2, 17):
        rewards = single(*[reward] * size)
        assert shaped_rewards(rewards, estimator=estimator).tolist() == [[0.0] * size]
        assert group_deviations(rewards).item() == 0.0
        # Next to a group whose rewards differ.
        if BY_HAND[estimator].by_group:
            other = single(*[reward] * (size - 1), reward + 1)
            equal, different = shaped_rewards(torch.cat([rewards, other]), estimator=estimator).tolist()
            assert equal == [0.0] * size
            assert all(different)


@pytest.mark.parametrize("estimator", COMPARING)
def test_rewards_that_differ_by_rounding_are_equal(estimator):
    summed = torch.tensor(0.1) + torch.tensor(0.7) + torch.tensor(0.1)
    rewards = torch.stack([summed, torch.tensor(0.9), summed, torch.tensor(0.9)])[None]
    assert len(set(rewards.flatten().tolist())) == 2, "they do differ"
    assert shaped_rewards(rewards, estimator=estimator).tolist() == [[0.0] * 4]
    # Around 0, rounding is that of the parts, which were about 1.
    around = single(0.0, torch.finfo(torch.float).eps)
    assert shaped_rewards(around, estimator=estimator).tolist() == [[0.0] * 2]


@pytest.mark.parametrize("estimator", NAMES)
def test_a_sample_alone_is_compared_with_nothing(estimator):
    (shaped,) = shaped_rewards(single(0.9), estimator=estimator).flatten().tolist()
    assert shaped == (0.0 if estimator in COMPARING else pytest.approx(0.9))


def test_remax_compares_with_the_greedy_response_of_the_same_prompt():
    rewards, baselines = torch.tensor([[0.0, 1.0], [1.0, 0.5]]), torch.tensor([[0.25], [1.0]])
    assert shaped_rewards(rewards, estimator="remax", greedy=baselines).tolist() == [[-0.25, 0.75], [0.0, -0.5]]
    # One sample of a prompt has one to be compared with, as in the paper.
    assert shaped_rewards(single(1.0), estimator="remax", greedy=torch.tensor([[0.25]])).tolist() == [[0.75]]
    # 0.1 + 0.7 + 0.1 in single precision is not 0.9, and no better.
    summed = (torch.tensor(0.1) + torch.tensor(0.7) + torch.tensor(0.1)).view(1, 1)
    assert shaped_rewards(single(0.9), estimator="remax", greedy=summed).tolist() == [[0.0]]


@pytest.mark.parametrize("estimator", NAMES)
def test_an_empty_response_has_no_advantage_and_spoils_none(estimator):
    rollout = RewardedRollout(
        rewards=torch.tensor([[1.0, 0.0, 0.0]]).double(),
        mask=torch.tensor([[1, 1], [0, 0], [1, 0]]),
        kl=torch.zeros(3, 2),
        values=torch.zeros(3, 2),
        kl_coef=0.0,
        gamma=1.0,
        lambd=1.0,
        divide=True,
        greedy=torch.zeros(1, 1),
    )
    found = ESTIMATORS[estimator](rollout)
    advantages, returns = found.advantages, found.returns
    assert advantages.isfinite().all()
    assert returns.isfinite().all()
    assert not returns[1].any()
    assert advantages[0, 0] > advantages[2, 0]


def test_the_last_token_that_counts_gets_the_reward_and_each_pays_its_kl():
    # Turns: what stands between them is not generated, and the padding behind neither.
    rollout = RewardedRollout(
        rewards=torch.tensor([[3.0, 5.0]]).double(),
        mask=torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]),
        kl=torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 4.0, 0.0, 0.0]]),
        kl_coef=0.5,
        gamma=0.5,
        lambd=1.0,
        divide=False,
    )
    found = ESTIMATORS["reinforce"](rollout)
    assert found.token_rewards.tolist() == [[-0.5, 0.0, 2.0, 0.0], [0.0, -2.0, 0.0, 5.0]]
    # -0.5 + 2 / 2, as what stands between turns discounts nothing; 5, 5 / 2, 5 / 4 - 2, -0.75 / 2.
    counted = rollout.mask.bool()
    assert found.returns[counted].tolist() == [0.5, 2.0, -0.375, -0.75, 2.5, 5.0]
    # Over the six generated tokens: (0.5 + 2 - 0.375 - 0.75 + 2.5 + 5) / 6.
    mean = 8.875 / 6
    assert found.advantages[counted].tolist() == pytest.approx(
        [value - mean for value in (0.5, 2.0, -0.375, -0.75, 2.5, 5.0)], abs=1e-6
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lambd", [1.0, 0.7])
def test_returns_and_generalized_advantages_are_openrlhfs(gamma, lambd):
    generator = torch.Generator().manual_seed(2)
    rewards, values = (torch.randn(3, 7, generator=generator) for _ in range(2))
    # Of one turn each; OpenRLHF discounts by what stands between two turns, and takes its value for 0.
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0, 0]])
    theirs = RemoteExperienceMaker.get_cumulative_returns(None, rewards, mask, gamma)
    counted = mask.bool()
    assert discounted_returns(mask * rewards, mask=mask, gamma=gamma)[counted].equal(theirs[counted])
    advantages, returns = RemoteExperienceMaker.get_advantages_and_returns(None, values, rewards, mask, gamma, lambd)
    found = generalized_advantages(mask * rewards, mask * values, mask=mask, gamma=gamma, lambd=lambd)
    assert found[counted].equal(advantages[counted])
    assert (found + mask * values)[counted].equal(returns[counted])


@pytest.mark.parametrize("estimator", COMPARING)
@pytest.mark.parametrize("fourth", [9.0, -1e6, 0.5])
def test_nobody_is_compared_with_a_sample_that_does_not_count(estimator, fourth):
    counted = torch.tensor([[True, True, True, False]])
    greedy = torch.tensor([[0.5]])
    rewards = single(1.0, 0.0, 0.5, fourth)
    found = estimate(rewards, estimator=estimator, counted=counted, greedy=greedy).token_rewards
    assert found.flatten()[:3].tolist() == pytest.approx(BY_HAND[estimator].uncounted, abs=1e-6)
    assert found.flatten()[3] == 0.0


def test_a_batch_is_whitened_over_its_tokens():
    # 1, 3 and 5 count: mean 3, variance 8/3.
    given, mask = torch.tensor([[1.0, 3.0], [50.0, 5.0]]), torch.tensor([[1, 1], [0, 1]])
    white = whitened(given, mask, divide=True)
    assert white[mask.bool()].tolist() == pytest.approx([-2 / math.sqrt(8 / 3), 0.0, 2 / math.sqrt(8 / 3)])
    white = whitened(given, mask, divide=False)
    assert white[mask.bool()].tolist() == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("value", [0.9, 1 / 3, -7.7, 0.0])
@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
def test_a_batch_of_equal_advantages_or_of_none_has_none(divide, value, tokens):
    mask = torch.arange(1200).view(2, 600) < tokens
    white = whitened(torch.full((2, 600), value), mask, divide=divide)
    assert not white.any()


def config(estimator: str, **changes: object) -> PPOConfig:
    settings = {
        "actor.model_name_or_path": "model",
        "actor.num_gpus_per_node": 1,
        "critic.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "data.prompt_dataset": "rows.jsonl",
        "reward.remote_url": "http://127.0.0.1:5000/get_reward",
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 3,
        "train.batch_size": 12,
        "algo.advantage.estimator": estimator,
    }
    return resolve(dotted.replace(PPOConfig(), settings | {k.replace("__", "."): v for k, v in changes.items()}))


def makers(settings: PPOConfig) -> tuple[RemoteExperienceMaker, StepParts]:
    strategy = SimpleNamespace(args=to_openrlhf_args(settings))
    arguments = (None, None, None, None, SimpleNamespace(value=0.1), strategy, SimpleNamespace(pad_token_id=0))
    ours = StepParts(settings)
    if settings.algo.advantage.estimator == "remax":
        ours.greedy = [greedy(0.25)] * 4
    return RemoteExperienceMaker(*arguments), ours


def greedy(reward: float, *, length: int = 2) -> Sample:
    return generated_sample(response=[5] * length, reward=reward)


def rewarded(rewards: Sequence[float], *, kl: float = 0.0) -> list[TrainingSample]:
    """A rollout of groups of three, with responses of several lengths, values and KL."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for place, reward in enumerate(rewards):
        one = sample([place // 3], [5] * (2 + place % 4), reward=reward, group=place // 3)
        one.place, one.location = place, f"rows.jsonl, line {place // 3 + 1}"
        one.kl = kl * torch.rand(len(one.loss_mask), generator=generator)
        one.values = torch.rand(len(one.loss_mask), generator=generator)
        samples.append(one)
    return samples


def openrlhfs(samples: Sequence[TrainingSample]) -> Experience:
    """The samples as OpenRLHF has them, padded."""
    return Experience(
        action_mask=stacked(samples, lambda one: one.loss_mask.long()),
        kl=stacked(samples, lambda one: one.kl),
        values=stacked(samples, lambda one: one.values),
        rewards=torch.tensor([one.reward for one in samples]),
        response_length=torch.tensor([one.response_tokens for one in samples]),
        index=list(range(len(samples))),
        info={"reward": torch.tensor([one.reward for one in samples])},
    )


@pytest.mark.parametrize(
    ("estimator", "no_std_norm"),
    [*((name, False) for name in UPSTREAM), *((name, True) for name in ("gae", "reinforce", "reinforce_baseline"))],
)
@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize("penalty", [None, 2.0])
def test_on_other_rewards_advantages_are_openrlhfs(estimator, kl, no_std_norm, penalty):
    changes = {"rollout__max_new_tokens": 4, "reward__overlong_buffer_len": penalty}
    settings = config(estimator, algo__advantage__no_std_norm=no_std_norm, **changes)
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(1)).tolist()
    theirs, ours = makers(settings)
    given = rewarded(rewards, kl=kl)
    (expected,) = theirs.compute_advantages_and_returns([openrlhfs(given)])
    for place, found in enumerate(ours.with_advantages(given)):
        # Theirs is in single precision, of values around 1 that are divided by deviations of 0.1 and more.
        close = {"atol": 1e-5, "rtol": 0, "check_dtype": False}
        for name in ("advantages", "returns"):
            values = getattr(expected, name)[place, : len(found.loss_mask)]
            torch.testing.assert_close(getattr(found, name)[found.loss_mask], values[found.loss_mask], **close)
        assert found.reward == pytest.approx(expected.rewards[place].item(), abs=1e-5)
        logged = {name: values[place].item() for name, values in expected.info.items()}
        assert {name: found.logged[name] for name in logged} == pytest.approx(logged, abs=1e-5)
        assert found.kl is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", NAMES)
def test_a_reward_that_is_no_number_stops_with_its_row(estimator, wrong):
    rewards = [1.0, 0.0] * 6
    rewards[7] = wrong
    _, ours = makers(config(estimator))
    with pytest.raises(UserError, match=rf"^rows.jsonl, line 3: the reward of a response is {wrong}, .*remote_url"):
        ours.with_advantages(rewarded(rewards))
