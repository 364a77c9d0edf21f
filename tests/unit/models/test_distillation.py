"""A student's distance to a teacher from hidden states, against what autograd makes of all logits of both at once."""

import pytest
import torch
from helpers.packed_batches import ShapeLog

from lmm_r1.models import distillation
from lmm_r1.models.distillation import (
    Distillation,
    DistilledOutcomes,
    Divergence,
    KeptInputs,
    TeacherTokens,
    WantedTokens,
)
from lmm_r1.models.output_layer import LayerOutcomes, token_outcomes

ROWS, WIDTH, HIDDEN, VOCABULARY = 3, 9, 5, 41
TEACHER_HIDDEN, TEACHER_VOCABULARY = 7, 43
DIVERGENCE = Divergence(name="jsd", beta=0.3, temperature=1.5)
GENERATOR = torch.Generator().manual_seed(4)
IDS = torch.randint(VOCABULARY, (ROWS, WIDTH), generator=GENERATOR)
WANTED = torch.rand(ROWS, WIDTH - 1, generator=GENERATOR) < 0.6
WEIGHTS = torch.randn(2, ROWS, WIDTH - 1, generator=GENERATOR, dtype=torch.double)
HIDDEN_STATES = torch.randn(ROWS, WIDTH, HIDDEN, generator=GENERATOR, dtype=torch.double)
TEACHER_STATES = torch.randn(ROWS, WIDTH, TEACHER_HIDDEN, generator=GENERATOR, dtype=torch.double)


def layer(hidden: int, vocabulary: int, *, bias: bool) -> torch.nn.Linear:
    made = torch.nn.Linear(hidden, vocabulary, bias=bias, dtype=torch.double)
    generator = torch.Generator().manual_seed(hidden)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return made


def wanted() -> WantedTokens:
    return WantedTokens.in_batch(WANTED, width=WIDTH, device=torch.device("cpu"))


def targets() -> torch.Tensor:
    return torch.nn.functional.pad(IDS[:, 1:], (0, 1))


def given(outcomes: LayerOutcomes, layer: torch.nn.Linear, hidden: torch.Tensor, *, scales: bool) -> torch.Tensor:
    """Both numbers of the tokens, (2, B, T - 1), of a model that scales its logits or does not."""
    if scales:
        found = outcomes.of_logits(layer(hidden) * 1.0)
    else:
        with token_outcomes(layer, outcomes):
            found = outcomes.of(layer(hidden))
        assert found is not None
    return torch.stack(found)[:, :, : WIDTH - 1]


def teacher_tokens(*, bias: bool, scales: bool) -> TeacherTokens:
    kept = KeptInputs(targets=targets(), wanted=wanted(), group=None)
    with torch.no_grad():
        given(kept, layer(TEACHER_HIDDEN, TEACHER_VOCABULARY, bias=bias), TEACHER_STATES, scales=scales)
    assert kept.tokens is not None
    return kept.tokens


def chunk_by_chunk(*, bias: bool, scale: tuple[bool, bool] = (False, False)) -> dict[str, torch.Tensor]:
    student, hidden = layer(HIDDEN, VOCABULARY, bias=bias), HIDDEN_STATES.clone().requires_grad_()
    compared = Distillation(teacher=teacher_tokens(bias=bias, scales=scale[1]), divergence=DIVERGENCE)
    outcomes = DistilledOutcomes(targets=targets(), wanted=wanted(), distillation=compared)
    return graded(given(outcomes, student, hidden, scales=scale[0]), student, hidden)


def all_at_once(*, bias: bool) -> dict[str, torch.Tensor]:
    student, hidden = layer(HIDDEN, VOCABULARY, bias=bias), HIDDEN_STATES.clone().requires_grad_()
    teacher = layer(TEACHER_HIDDEN, TEACHER_VOCABULARY, bias=bias)
    logits = student(hidden)[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    with torch.no_grad():
        log_p = (teacher(TEACHER_STATES)[:, :-1, :VOCABULARY] / 1.5).log_softmax(-1)
    log_q = (logits / 1.5).log_softmax(-1)
    log_m = (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()
    distance = (0.3 * log_p.exp() * (log_p - log_m) + 0.7 * log_q.exp() * (log_q - log_m)).sum(-1)
    return graded(torch.stack([log_probs, distance]) * WANTED, student, hidden)


def graded(values: torch.Tensor, student: torch.nn.Linear, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values, and the gradients of their weighted sum."""
    (values * WEIGHTS).sum().backward()
    gradients = {name: weight.grad for name, weight in student.named_parameters()}
    return {"values": values.detach(), "hidden": hidden.grad, **gradients}


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [(False, False), (True, False), (False, True)], ids=["plain", "student", "teacher"])
def test_values_and_gradients_are_those_of_all_logits(monkeypatch, chunk, bias, scale):
    monkeypatch.setattr(distillation, "CHUNK_BYTES", chunk * 4 * VOCABULARY)
    expected, found = all_at_once(bias=bias), chunk_by_chunk(bias=bias, scale=scale)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


def test_no_tensor_of_all_targets_and_a_vocabulary_is_made(monkeypatch):
    monkeypatch.setattr(distillation, "CHUNK_BYTES", 2 * 4 * VOCABULARY)
    sizes = {}
    for way in (all_at_once, chunk_by_chunk):
        with ShapeLog() as log:
            way(bias=False)
        sizes[way] = max(torch.Size(shape).numel() for shape in log.shapes)
    assert sizes[all_at_once] >= ROWS * (WIDTH - 1) * VOCABULARY
    # The teacher's weight; two tokens' logits are fewer.
    assert sizes[chunk_by_chunk] == TEACHER_HIDDEN * TEACHER_VOCABULARY


def test_a_batch_without_targets_has_gradients_of_zero():
    """A rank whose rows were all too long still takes its part in the collectives of a backward pass."""
    nothing = WantedTokens.in_batch(torch.zeros_like(WANTED), width=WIDTH, device=torch.device("cpu"))
    student, hidden = layer(HIDDEN, VOCABULARY, bias=False), HIDDEN_STATES.clone().requires_grad_()
    tokens = TeacherTokens(inputs=torch.zeros(0, TEACHER_HIDDEN).double(), layer=layer(TEACHER_HIDDEN, 43, bias=False))
    compared = Distillation(teacher=tokens, divergence=DIVERGENCE)
    outcomes = DistilledOutcomes(targets=targets(), wanted=nothing, distillation=compared)
    given(outcomes, student, hidden, scales=False).sum().backward()
    assert student.weight.grad.abs().max() == hidden.grad.abs().max() == 0
