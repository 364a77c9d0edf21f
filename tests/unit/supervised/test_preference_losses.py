"""Losses on pairs of responses, with numbers worked out by hand, and as OpenRLHF computes those that it has."""

import math

import pytest
import torch
from openrlhf.models import DPOLoss

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig
from lmm_r1.supervised.pairs import (
    Preferences,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    nll_loss,
    preferences,
    score_loss,
    simpo_loss,
)


def pair(chosen: float, rejected: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([chosen]), torch.tensor([rejected])


def test_a_log_ratio_that_is_larger_by_one():
    # b d = 0.5: -log sigmoid(0.5) = log(1 + e^-0.5) = 0.474077, and -log sigmoid(-0.5) = 0.974077.
    assert dpo_loss(*pair(3.0, 2.0), beta=0.5).item() == pytest.approx(0.474077, abs=1e-6)
    smoothed = dpo_loss(*pair(3.0, 2.0), beta=0.5, label_smoothing=0.25)
    assert smoothed.item() == pytest.approx(0.75 * 0.474077 + 0.25 * 0.974077, abs=1e-6)


def test_the_gradient_of_dpo_is_that_of_the_paper():
    chosen, rejected = (value.requires_grad_() for value in pair(1.0, 3.0))
    dpo_loss(chosen, rejected, beta=0.5).backward()
    # - b sigmoid(-b d) with d = -2: - 0.5 sigmoid(1) = - 0.5 x 0.731059.
    assert chosen.grad.item() == pytest.approx(-0.365529, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(0.365529, abs=1e-6)


def test_ipo_draws_the_difference_to_one_over_two_beta():
    assert ipo_loss(*pair(3.0, 2.0), beta=0.5).item() == 0.0
    assert ipo_loss(*pair(2.0, 2.0), beta=0.5).item() == 1.0
    assert ipo_loss(*pair(6.0, 2.0), beta=0.25).item() == pytest.approx(4.0)


def test_simpo_wants_a_margin_between_mean_log_probs():
    # 2 x 0.5 - 1 = 0, and 2 x 0.5 - 0.5 = 0.5.
    assert simpo_loss(*pair(-1.0, -1.5), beta=2.0, gamma=1.0).item() == pytest.approx(math.log(2))
    assert simpo_loss(*pair(-1.0, -1.5), beta=2.0, gamma=0.5).item() == pytest.approx(0.474077, abs=1e-6)


def test_the_nll_term_is_a_mean_over_the_responses_tokens():
    assert nll_loss(torch.tensor([-6.0, 0.0]), torch.tensor([3, 0])).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"ipo": True}])
def test_losses_and_rewards_are_openrlhfs(settings):
    policy, reference = torch.randn(2, 8, 1, generator=torch.Generator().manual_seed(0)).mul(5)
    theirs = DPOLoss(0.3, **settings)(*policy.chunk(2), *reference.chunk(2))
    flags = {"label_smoothing": settings.get("label_smoothing", 0.0), "ipo_enable": "ipo" in settings, "beta": 0.3}
    ours = found(policy, reference, **flags)
    expected = (theirs[0], *(reward.flatten() for reward in theirs[1:]))
    for value, wanted in zip((ours.loss.mean(), ours.chosen_reward, ours.rejected_reward), expected, strict=True):
        torch.testing.assert_close(value, wanted)


def found(policy: torch.Tensor, reference: torch.Tensor | None, **flags: object) -> Preferences:
    model = dotted.replace(DPOConfig(), {f"model.{name}": value for name, value in flags.items()}).model
    return preferences(policy, reference, torch.ones_like(policy, dtype=torch.bool), model=model)


# Two tokens of a chosen response, and one of a rejected one.
POLICY, REFERENCE = torch.tensor([[-1.0, -2.0], [-4.0, 0.0]]), torch.tensor([[-2.0, -3.0], [-4.5, 0.0]])
MASK = torch.tensor([[True, True], [True, False]])


def of_two(**flags: object) -> Preferences:
    model = dotted.replace(DPOConfig(), {f"model.{name}": value for name, value in flags.items()}).model
    return preferences(POLICY, None if model.simpo_enable else REFERENCE, MASK, model=model)


def test_log_probs_are_summed_over_tokens_or_averaged_where_that_is_asked_for():
    # Log-ratios 2 and 0.5 as sums, 1 and 0.5 as means.
    summed, averaged = of_two(beta=1.0, ipo_enable=True), of_two(beta=1.0, ipo_enable=True, mean_log_probs=True)
    assert (summed.chosen_reward.item(), summed.rejected_reward.item()) == (2.0, 0.5)
    assert (averaged.chosen_reward.item(), averaged.rejected_reward.item()) == (1.0, 0.5)
    assert (summed.loss.item(), averaged.loss.item()) == (1.0, 0.0)
    assert (averaged.chosen_log_prob.item(), averaged.rejected_log_prob.item()) == (-3.0, -4.0)
    assert averaged.nll.item() == 1.5


def test_simpo_asks_no_reference_and_averages():
    # Means -1.5 and -4: rewards -3 and -8, which differ by 4.5 more than gamma.
    result = of_two(beta=2.0, simpo_enable=True, simpo_gamma=0.5)
    assert (result.chosen_reward.item(), result.rejected_reward.item()) == (-3.0, -8.0)
    assert result.loss.item() == pytest.approx(math.log1p(math.exp(-4.5)))


def test_what_is_logged_of_a_pair():
    logged = {name: value.item() for name, value in of_two(beta=0.5).logged.items()}
    assert logged == {
        "pair_accuracy": 1.0,
        "reward_margin": 0.75,
        "chosen_reward": 1.0,
        "rejected_reward": 0.25,
        "chosen_log_prob": -3.0,
        "rejected_log_prob": -4.0,
        "nll_loss": 1.5,
    }


def test_the_better_response_is_to_have_the_larger_reward_by_a_margin():
    assert bradley_terry_loss(*pair(1.0, 1.0), margin=None).item() == pytest.approx(math.log(2))
    # log(1 + e^-0.5) = 0.474077, with a reward that is larger by 0.5, or by 1.5 where 1 is asked for.
    assert bradley_terry_loss(*pair(2.0, 1.5), margin=None).item() == pytest.approx(0.474077, abs=1e-6)
    assert bradley_terry_loss(*pair(2.0, 0.5), margin=torch.tensor([1.0])).item() == pytest.approx(0.474077, abs=1e-6)


def test_rewards_are_drawn_to_scores():
    # (1 - 3)^2 = 4 and (2 - 2)^2 = 0.
    assert score_loss(*pair(1.0, 2.0), torch.tensor([[3.0], [2.0]])).item() == 2.0
