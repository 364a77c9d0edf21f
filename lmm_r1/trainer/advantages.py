"""What makes advantages of rewards: statistics of groups and of batches, in double precision.

Rewards that differ by rounding alone count as equal, and what is equal has no advantage: divided by a deviation that is
rounding itself, it would have one of any size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Rewards are sums of a few parts in single precision, each off by up to 6e-8 of its size. A spread of up to so much, of
# the largest value or of 1, is rounding; no rule gives rewards that are meant to differ by less.
ROUNDING = 1e-6
# As in OpenRLHF: what is added to a group's deviation, and the least variance of a batch.
DEVIATION_EPSILON = 1e-9
LEAST_VARIANCE = 1e-8


def shaped_rewards(rewards: torch.Tensor, *, estimator: str) -> torch.Tensor:
    """Return each sample's reward against its group's or its batch's, (G, n), in double precision.

    - rloo: minus the mean of the group's other rewards (RLOO, arXiv:2402.14740).
    - reinforce_baseline: minus the group's mean (REINFORCE++-baseline, arXiv:2501.03262), as is
      dr_grpo (Dr. GRPO, arXiv:2503.20783).
    - group_norm: also divided by the group's standard deviation (GRPO, arXiv:2402.03300).
    - flash_reinforce: minus the mean of all rewards of the batch (OpenRLHF's FlashREINFORCE).
    - gae, reinforce: as it is.

    Args:
        rewards: (G, n), of the n samples of each of G groups.
    """
    rewards = rewards.double()
    if estimator in ("gae", "reinforce"):
        return rewards
    if estimator == "flash_reinforce":
        return _centred(rewards.reshape(1, -1)).reshape(rewards.shape)
    centred = _centred(rewards)
    if estimator in ("reinforce_baseline", "dr_grpo"):
        return centred
    samples = rewards.shape[-1]
    if samples == 1:
        # It has nothing to be compared with.
        return centred
    if estimator == "rloo":
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        return centred * (samples / (samples - 1))
    assert estimator == "group_norm", estimator
    return centred / (group_deviations(rewards) + DEVIATION_EPSILON)


def group_deviations(rewards: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation (n - 1 degrees of freedom) of each group's rewards (G, n), (G, 1); 0 for equal ones."""
    centred = _centred(rewards.double())
    return (centred.square().sum(-1, keepdim=True) / max(rewards.shape[-1] - 1, 1)).sqrt()


def whitened(advantages: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], *, divide: bool) -> list[torch.Tensor]:
    """Return advantages minus the mean over all tokens of a batch, divided by their standard deviation where asked to.

    Advantages that are all equal, of one token for example, become 0; so do those of a batch without any token.

    Args:
        advantages: (B, A) each.
        masks: (B, A) each; the tokens that count are 1.
    """
    counted = [values[mask.bool()] for values, mask in zip(advantages, masks, strict=True)]
    values = torch.cat(counted).double()
    if not len(values) or _are_equal(values):
        return [torch.zeros_like(part, dtype=torch.float) for part in advantages]
    mean = values.mean()
    scale = values.var(correction=0).clamp(min=LEAST_VARIANCE).rsqrt() if divide else 1.0
    return [((part.double() - mean) * scale).float() for part in advantages]


def _centred(rewards: torch.Tensor) -> torch.Tensor:
    """Return rewards minus the mean of their row, (G, n); exactly 0 where those of a row are equal."""
    return torch.where(_are_equal(rewards), 0.0, rewards - rewards.mean(-1, keepdim=True))


def _are_equal(values: torch.Tensor) -> torch.Tensor:
    """Return whether the values of each row differ by rounding alone, (..., 1); NaN is equal to nothing."""
    spread = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
    return spread <= ROUNDING * values.abs().amax(-1, keepdim=True).clamp(min=1.0)
