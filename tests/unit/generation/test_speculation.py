"""What is counted of guessed tokens, and how an engine bans tokens by itself."""

from types import SimpleNamespace

import pytest
import torch

from lmm_r1.generation.engine_arguments import Guesses
from lmm_r1.generation.worker_extension import TokenBan


def test_a_rollouts_guesses_are_those_of_all_engines_since_it_began():
    before = Guesses(drafted=10, accepted=4)
    after = sum([Guesses(drafted=12, accepted=6), Guesses(drafted=10, accepted=1)], start=Guesses())
    assert after.since(before).metrics() == {
        "rollout/drafted_tokens": 12,
        "rollout/accepted_tokens": 3,
        "rollout/acceptance_rate": 0.25,
    }
    assert Guesses().metrics() == {"rollout/drafted_tokens": 0, "rollout/accepted_tokens": 0}


class Model(torch.nn.Module):
    """Makes logits of what it is given: none on ranks that sample nothing."""

    def compute_logits(self, hidden_states: torch.Tensor | None) -> torch.Tensor | None:
        return None if hidden_states is None else hidden_states.clone()


def banning(model: torch.nn.Module, *banned: int) -> TokenBan:
    worker = TokenBan()
    worker.model_runner, worker.device = SimpleNamespace(get_model=lambda: model), torch.device("cpu")
    worker.ban_tokens(banned)
    return worker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_banned_tokens_are_out_at_every_position_and_no_bias_brings_them_back(dtype):
    model, inf = Model(), torch.inf
    worker = banning(model, 1, 3)
    logits = model.compute_logits(torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=dtype))
    assert logits.tolist() == [[1.0, -inf, 3.0, -inf], [5.0, -inf, 7.0, -inf]]
    # The largest that vLLM takes of a request, which it adds after this.
    assert (logits + 100).tolist() == [[101.0, -inf, 103.0, -inf], [105.0, -inf, 107.0, -inf]]
    assert model.compute_logits(None) is None
    worker.ban_tokens([0])
    assert model.compute_logits(torch.ones(1, 4, dtype=dtype)).tolist() == [[-inf, 1.0, 1.0, 1.0]]
