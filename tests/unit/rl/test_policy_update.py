"""The policy's update: what OpenRLHF's loss gets for old log-probs."""

import pytest
import torch
from openrlhf.models.loss import PolicyLoss

from lmm_r1.rl.workers import loss_before_update

pytestmark = pytest.mark.unit


def test_without_old_log_probs_the_policy_is_the_old_one():
    log_probs = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    advantages = torch.tensor([[2.0, 2.0, 0.0], [-1.0, 0.0, 0.0]])
    loss, clipped, kl, *_ = loss_before_update(PolicyLoss(), log_probs, None, advantages, action_mask=mask)
    # Ratios of 1: minus the mean advantage of three tokens, whose gradient is the advantage itself.
    assert loss.item() == pytest.approx(-(2 + 2 - 1) / 3)
    assert (clipped.item(), kl.item()) == (0, 0)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -advantages / 3)


def test_old_log_probs_that_are_given_are_used():
    log_probs = torch.zeros(1, 1)
    loss, *_ = loss_before_update(
        PolicyLoss(), log_probs, log_probs - torch.tensor(1.1).log(), torch.ones(1, 1), action_mask=torch.ones(1, 1)
    )
    assert loss.item() == pytest.approx(-1.1)
