import pytest
import torch

from lmm_r1.models.banned_tokens import BAN_BIAS, ban

pytestmark = pytest.mark.unit


def test_banned_tokens_lose_the_bias_in_every_position_and_the_others_nothing():
    logits = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    assert ban(logits, torch.tensor([0, 2])).tolist() == [[[-99.0, 2.0, -97.0], [-96.0, 5.0, -94.0]]]
    assert logits.tolist() == [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]], "the caller's logits stay as they are"


def test_the_bias_is_the_strongest_that_the_engine_takes():
    assert BAN_BIAS == -100.0


def test_the_distribution_is_that_of_the_remaining_tokens():
    logits = torch.zeros(4, requires_grad=True)
    log_probs = torch.log_softmax(ban(logits, torch.tensor([1, 3])), dim=-1)
    assert log_probs.exp().tolist() == pytest.approx([0.5, 0.0, 0.5, 0.0], abs=1e-6)
    log_probs[0].backward()
    assert logits.grad.tolist() == pytest.approx([0.5, 0.0, -0.5, 0.0], abs=1e-6)


def test_no_banned_tokens_change_nothing():
    logits = torch.tensor([1.0, 2.0])
    assert ban(logits, torch.tensor([], dtype=torch.long)).tolist() == [1.0, 2.0]
