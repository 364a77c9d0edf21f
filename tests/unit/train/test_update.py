"""One optimizer step: the same however its samples are divided into passes, and what is logged of it and of several."""

from collections.abc import Sequence

import pytest
import torch
from helpers.sessions import AccumulatingStrategy, PlayedEngine

from lmm_r1.train.update import Counts, Step, Terms, mean_of_steps, update

Pass = Sequence[tuple[float, ...]]
"""Of each sample the losses of its tokens."""
FIRST, SECOND, EMPTY = (1.0, 3.0), (5.0,), ()


def counts(given: Pass) -> Counts:
    return Counts(units=sum(map(bool, given)), tokens=sum(map(len, given)), samples=len(given))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "passes", [[(FIRST, SECOND, EMPTY)], [(FIRST,), (SECOND, EMPTY)], [(EMPTY, FIRST), (SECOND,)]]
)
def test_a_step_is_the_same_however_it_is_divided_into_passes(passes):
    weight, engine, strategy = torch.tensor(2.0, requires_grad=True), PlayedEngine(), AccumulatingStrategy()

    def terms(given: Pass) -> Terms:
        means = torch.tensor([sum(losses) / len(losses) for losses in given if losses])
        tokens = torch.tensor([loss for losses in given for loss in losses])
        return Terms(
            loss=(weight * means).sum(),
            aux_loss=8 * weight,
            sums={"mean": means.sum()},
            token_sums={"token": tokens.sum()},
        )

    step = update(strategy, engine, passes, counts=counts, terms=terms, aux_weight=0.25)
    # Of two sequences with the means 2 and 5, and of three tokens; the other loss is a mean over samples.
    assert step == Step(loss=7.0, means={"mean": 3.5, "token": 3.0}, tokens=3, rate=0.1, grad_norm=0.0)
    assert weight.grad.item() == pytest.approx(3.5 + 0.25 * 8)
    assert engine.boundaries == [False] * (len(passes) - 1) + [True]
    assert strategy.steps == 1


def test_the_means_of_steps_weigh_them_by_their_tokens():
    steps = [
        Step(loss=loss, means={"kl": kl}, tokens=tokens, rate=0.0, grad_norm=0.0)
        for loss, kl, tokens in ((1.0, 0.0, 3), (5.0, 4.0, 1))
    ]
    assert mean_of_steps(steps) == {"loss": 2.0, "kl": 1.0}
