"""An optimizer step is the same however its samples are divided into passes and over ranks."""

import pytest
import torch
from helpers.played_updates import PlayedEngine, PlayedStrategy, update_by_ids
from helpers.rl_steps import group, sample

from lmm_r1.train.update import Counts, Step, Terms, mean_of_steps, update

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("sizes", [[[4]], [[3, 1]], [[1, 1, 1, 1]], [[2], [2]], [[1, 1], [1, 1]], [[3], [1]]])
def test_the_losses_of_a_steps_passes_add_up_to_the_mean_over_the_step(sizes, per_token, monkeypatch):
    # The tokens of four responses, and a sample without a response, which is none for the loss.
    given = [*group([1, 2], [3, 1, 2]), sample([3], [53] * 4), sample([3], [])]
    samples = iter(given[:3] + given[4:] + given[3:4])
    ranks = [[[next(samples) for _ in range(size)] for size in rank] for rank in sizes]
    ranks[-1][-1] += samples
    made = update_by_ids(ranks, per_token=per_token, monkeypatch=monkeypatch)
    of_tokens, of_sequences = (3 * 50 + 51 + 2 * 52 + 4 * 53) / 10, (50 + 51 + 52 + 53) / 4
    mean = of_tokens if per_token else of_sequences
    for step, engine in made:
        assert step.loss == pytest.approx(mean)
        assert step.means == pytest.approx({"unit": mean, "token": of_tokens})
        # The rate is that of the step, and not of the next one.
        assert (step.tokens, step.rate, step.grad_norm, engine.steps) == (10, 0.25, 3.0, 1)
        assert step.computed == sum(len(one.token_ids) for one in given) > 10
    # DeepSpeed averages the gradients of ranks.
    assert sum(engine.weight.grad.item() for _, engine in made) / len(made) == pytest.approx(mean)
    # Only the last of a rank's passes makes the step.
    assert [engine.boundaries for _, engine in made] == [[False] * (len(rank) - 1) + [True] for rank in sizes]


def test_the_load_balancing_loss_is_a_mean_over_samples():
    engine = PlayedEngine(weight=torch.ones((), requires_grad=True))
    # Passes of 3 samples and of 1, whose losses are means over them.
    step = update(
        PlayedStrategy(),
        engine,
        [(3, 1.0), (1, 5.0)],
        counts=lambda one: Counts(units=1, tokens=1, samples=one[0]),
        terms=lambda one: Terms(loss=engine.weight * 0, aux_loss=engine.weight * one[1]),
        aux_weight=0.5,
    )
    assert engine.weight.grad.item() == pytest.approx(0.5 * (3 * 1 + 5) / 4)
    assert step.loss == 0.0, "what is logged is that of the units"


def test_a_step_without_units_is_worth_nothing_and_stays_a_number(monkeypatch):
    for per_token in (True, False):
        ((step, engine),) = update_by_ids(
            [[[sample([1], [])], [sample([1, 2], [])]]], per_token=per_token, monkeypatch=monkeypatch
        )
        assert (step.loss, step.means, step.tokens) == (0.0, {"unit": 0.0, "token": 0.0}, 0)
        assert engine.weight.grad == 0.0


def test_the_means_of_several_steps_are_over_their_tokens():
    steps = [
        Step(loss=loss, means={"kl": 2 * loss}, tokens=tokens, computed=9, rate=0.1, grad_norm=1.0)
        for loss, tokens in ((1.0, 3), (5.0, 1))
    ]
    assert mean_of_steps(steps) == {"loss": 2.0, "kl": 4.0}
