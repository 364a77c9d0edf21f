"""What is counted of guessed tokens, and how an engine bans tokens by itself."""

from types import SimpleNamespace

import pytest
import torch

from lmm_r1.generation.speculation import Guesses
from lmm_r1.generation.worker_extension import TokenBan

pytestmark = pytest.mark.unit


def test_a_rollouts_guesses_are_those_of_all_engines_since_it_began():
    before = Guesses(drafted=10, accepted=4)
    after = sum([Guesses(drafted=12, accepted=6), Guesses(drafted=10, accepted=1)], start=Guesses())
    assert after.since(before).metrics() == {
        "rollout/drafted_tokens": 12,
        "rollout/accepted_tokens": 3,
        "rollout/acceptance_rate": 0.25,
    }
    assert Guesses().metrics() == {"rollout/drafted_tokens": 0, "rollout/accepted_tokens": 0}


def test_banned_tokens_have_their_bias_at_every_position_and_a_rank_without_logits_none():
    logits = [torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]), None]
    model = torch.nn.Module()
    model.compute_logits = lambda hidden_states: logits.pop(0)
    worker = TokenBan()
    worker.model_runner, worker.device = SimpleNamespace(get_model=lambda: model), torch.device("cpu")
    worker.ban_tokens((1, 3))
    assert model.compute_logits(None).tolist() == [[1.0, -98.0, 3.0, -96.0], [5.0, -94.0, 7.0, -92.0]]
    assert model.compute_logits(None) is None
