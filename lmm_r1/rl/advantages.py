"""Advantage estimators: pure functions of a rollout's rewards, whose names are those of the configuration.

All but `remax` are OpenRLHF's with one difference: statistics are in double precision, and rewards that
differ only by rounding count as equal and have no advantage. Divided by a deviation that is itself rounding, they could get
an advantage of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

import torch

from lmm_r1.config.ppo import EstimatorName
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import load_user_function

# Rewards are sums of a few parts in single precision, each with an error of up to 6e-8 of its size. A smaller spread than
# this, relative to the largest value or to 1, is rounding; no rule gives rewards that differ by less on purpose.
ROUNDING = 1e-6
# As in OpenRLHF: added to the deviation of a group, and the least variance of a batch.
DEVIATION_EPSILON = 1e-9
LEAST_VARIANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class RewardedRollout:
    """The input of an estimator: G groups of n samples of up to A + 1 tokens, one group after the other."""

    rewards: torch.Tensor
    """(G, n)."""
    mask: torch.Tensor
    """(G n, A), 1 for the generated tokens."""
    kl: torch.Tensor
    """(G n, A), the estimated KL divergence of each token, which reduces its reward."""
    values: torch.Tensor | None = None
    """(G n, A), the critic's."""
    kl_coef: float
    gamma: float
    lambd: float
    """GAE's."""
    counted: torch.Tensor | None = None
    """(G, n), False for samples that are not trained on: no other is compared with them, and their advantage is 0.
    None counts all."""
    divide: bool
    """Whether whitened advantages are also divided by their standard deviation."""
    greedy: torch.Tensor | None = None
    """(G, 1), the reward of the greedy response to each prompt; None if none is generated."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The output of an estimator, all (G n, A); values of tokens that were not generated are undefined."""

    token_rewards: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


Estimator = Callable[[RewardedRollout], Estimate]


def gae(rollout: RewardedRollout) -> Estimate:
    """PPO with a critic (arXiv:1707.06347), by generalized advantage estimation (arXiv:1506.02438), whitened.

    A_t = sum_k (gamma lambda)^k delta_{t+k} with delta_t = r_t + gamma V_{t+1} - V_t, and returns A_t + V_t.
    """
    assert rollout.values is not None, "gae has a critic"
    rewards, mask = token_rewards(rollout, rollout.rewards), rollout.mask
    values = mask * rollout.values
    advantages = generalized_advantages(mask * rewards, values, mask=mask, gamma=rollout.gamma, lambd=rollout.lambd)
    return _whitened(Estimate(token_rewards=rewards, advantages=advantages, returns=advantages + values), rollout)


def reinforce(rollout: RewardedRollout) -> Estimate:
    """REINFORCE++ (arXiv:2501.03262): A_t = whitened sum_k gamma^k r_{t+k}."""
    return _whitened(_returns(rollout, rollout.rewards), rollout)


def reinforce_baseline(rollout: RewardedRollout) -> Estimate:
    """REINFORCE++-baseline (arXiv:2501.03262): A_i = whitened r_i - mean(r), by the rewards r of sample i's group."""
    return _whitened(_returns(rollout, centred(rollout.rewards, rollout.counted)), rollout)


def rloo(rollout: RewardedRollout) -> Estimate:
    """RLOO (arXiv:2402.14740): A_i = r_i - the mean of the group's other rewards."""
    samples = _counts(rollout.rewards, rollout.counted)
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1); a single sample has nothing to compare with.
    return _returns(rollout, centred(rollout.rewards, rollout.counted) * (samples / (samples - 1).clamp(min=1)))


def group_norm(rollout: RewardedRollout) -> Estimate:
    """GRPO (arXiv:2402.03300): A_i = (r_i - mean(r)) / std(r), by the rewards r of sample i's group."""
    deviations = group_deviations(rollout.rewards, rollout.counted)
    return _returns(rollout, centred(rollout.rewards, rollout.counted) / (deviations + DEVIATION_EPSILON))


def dr_grpo(rollout: RewardedRollout) -> Estimate:
    """Dr. GRPO (arXiv:2503.20783): A_i = r_i - mean(r), by the rewards r of sample i's group."""
    return _returns(rollout, centred(rollout.rewards, rollout.counted))


def flash_reinforce(rollout: RewardedRollout) -> Estimate:
    """OpenRLHF's FlashREINFORCE: A_i = r_i - mean(r), by the rewards r of the whole rollout."""
    rewards, counted = rollout.rewards, rollout.counted
    everywhere = None if counted is None else counted.reshape(1, -1)
    return _returns(rollout, centred(rewards.reshape(1, -1), everywhere).reshape(rewards.shape))


def remax(rollout: RewardedRollout) -> Estimate:
    """ReMax (arXiv:2310.10505): A_i = r_i - the reward of the greedy response to the same prompt."""
    assert rollout.greedy is not None, "remax has greedy responses"
    rewards, greedy = rollout.rewards.double(), rollout.greedy.double().expand_as(rollout.rewards)
    equal = _are_equal(torch.stack([rewards, greedy], dim=-1)).squeeze(-1)
    without = equal if rollout.counted is None else equal | ~rollout.counted
    return _returns(rollout, torch.where(without, 0.0, rewards - greedy))


ESTIMATORS: dict[str, Estimator] = {name: globals()[name] for name in get_args(EstimatorName)}
"""The functions above that `--algo.advantage.estimator` names."""


@cache
def estimator_named(name: str) -> Estimator:
    """Return the function that `--algo.advantage.estimator` names; a user's is tried with a group of two samples.

    A user's function returns the advantages of the samples, (G, n), or an `Estimate`. Raises UserError if it cannot be used.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    function = load_user_function(name, default="estimate", flag="--algo.advantage.estimator")

    def estimate(rollout: RewardedRollout) -> Estimate:
        found, shape = function(rollout), rollout.rewards.shape
        if isinstance(found, torch.Tensor) and found.shape == shape:
            return _returns(rollout, found)
        if not isinstance(found, Estimate):
            raise UserError(
                f"{name}: an estimator returns a tensor of the rewards' shape {tuple(shape)}, or an Estimate"
            )
        return found

    rewards, zeros = torch.tensor([[1.0, 0.0]], dtype=torch.double), torch.zeros(2, 2)
    ones = torch.ones(2, 2, dtype=torch.long)
    plain = RewardedRollout(rewards=rewards, mask=ones, kl=zeros, kl_coef=0.0, gamma=1.0, lambd=1.0, divide=True)
    estimate(replace(plain, values=zeros, greedy=torch.zeros_like(rewards[:, :1])))
    return estimate


def token_rewards(rollout: RewardedRollout, rewards: torch.Tensor) -> torch.Tensor:
    """Return the rewards of tokens, (G n, A): minus the token's KL, plus the sample's reward at its last token.

    Args:
        rewards: (G, n), the rewards of the samples.
    """
    mask, kl = rollout.mask, rollout.kl
    last = mask.shape[1] - 1 - mask.long().fliplr().argmax(dim=1, keepdim=True)
    outcomes = torch.zeros_like(kl).scatter_(1, last, rewards.reshape(-1, 1).to(kl.dtype))
    return outcomes - max(rollout.kl_coef, 0.0) * kl


def discounted_returns(rewards: torch.Tensor, *, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return G_t = r_t + gamma G_{t+1} of the rewards of tokens, (B, A).

    The next token is the next generated one: text between two turns discounts nothing.

    Args:
        mask: (B, A), 1 for the generated tokens.
    """
    returns = []
    later = rewards.new_zeros(len(rewards))
    for place in reversed(range(rewards.shape[1])):
        later = torch.where(mask[:, place].bool(), rewards[:, place] + gamma * later, later)
        returns.append(later)
    return torch.stack(returns[::-1], dim=1)


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, *, mask: torch.Tensor, gamma: float, lambd: float
) -> torch.Tensor:
    """Return A_t = delta_t + gamma lambda A_{t+1}, (B, A), from one generated token to the next; see `gae`.

    Args:
        rewards, values: (B, A), 0 for tokens that were not generated.
        mask: (B, A), 1 for the generated tokens.
    """
    advantages = []
    later = next_value = rewards.new_zeros(len(rewards))
    for place in reversed(range(rewards.shape[1])):
        generated = mask[:, place].bool()
        delta = rewards[:, place] + gamma * next_value - values[:, place]
        later = torch.where(generated, delta + gamma * lambd * later, later)
        advantages.append(later)
        next_value = torch.where(generated, values[:, place], next_value)
    return torch.stack(advantages[::-1], dim=1)


def centred(rewards: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Return rewards minus the mean of their row, (G, n), in double precision; exactly 0 for rows of equal rewards.

    Args:
        counted: (G, n), False for rewards that do not count; they become 0.
    """
    rewards = rewards.double()
    if counted is not None:
        # A reward equal to its row's mean changes neither the mean nor the spread.
        sums = torch.where(counted, rewards, 0.0).sum(-1, keepdim=True)
        rewards = torch.where(counted, rewards, sums / _counts(rewards, counted).clamp(min=1))
    return torch.where(_are_equal(rewards), 0.0, rewards - rewards.mean(-1, keepdim=True))


def group_deviations(rewards: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Return the standard deviation (n - 1 degrees of freedom) of each group's rewards (G, n), (G, 1); 0 for equal ones."""
    squares = centred(rewards, counted).square().sum(-1, keepdim=True)
    return (squares / (_counts(rewards, counted) - 1).clamp(min=1)).sqrt()


def _counts(rewards: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    """Return how many rewards of each row count, (G, 1)."""
    if counted is None:
        return torch.full((*rewards.shape[:-1], 1), float(rewards.shape[-1]), dtype=torch.double)
    return counted.double().sum(-1, keepdim=True)


def whitened(advantages: torch.Tensor, mask: torch.Tensor, *, divide: bool) -> torch.Tensor:
    """Return advantages minus the mean over all tokens, with `divide` also divided by their deviation.

    Advantages that are all equal, for example of one token, become 0, as do those of a batch without tokens.

    Args:
        advantages, mask: (B, A); the tokens that count are 1.
    """
    values = advantages[mask.bool()].double()
    if not len(values) or _are_equal(values):
        return torch.zeros_like(advantages, dtype=torch.float)
    scale = values.var(correction=0).clamp(min=LEAST_VARIANCE).rsqrt() if divide else 1.0
    return ((advantages.double() - values.mean()) * scale).float()


def _returns(rollout: RewardedRollout, rewards: torch.Tensor) -> Estimate:
    """Return the estimate whose advantages are the returns of the samples' rewards (G, n)."""
    found = token_rewards(rollout, rewards)
    returns = discounted_returns(rollout.mask * found, mask=rollout.mask, gamma=rollout.gamma)
    return Estimate(token_rewards=found, advantages=returns.clone(), returns=returns)


def _whitened(estimate: Estimate, rollout: RewardedRollout) -> Estimate:
    return replace(estimate, advantages=whitened(estimate.advantages, rollout.mask, divide=rollout.divide))


def _are_equal(values: torch.Tensor) -> torch.Tensor:
    """Return whether the values of each row differ only by rounding, (..., 1); NaN is equal to nothing."""
    spread = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
    return spread <= ROUNDING * values.abs().amax(-1, keepdim=True).clamp(min=1.0)


@dataclass(kw_only=True)
class KLWeight:
    """The weight of the KL penalty: constant, or adapted to a target (arXiv:1909.08593)."""

    value: float
    target: float | None = None
    horizon: float = 1.0

    def update(self, kl: float, *, samples: int) -> None:
        """Move the weight towards the one that gives the target, after a step with this KL."""
        if self.target:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * samples / self.horizon
