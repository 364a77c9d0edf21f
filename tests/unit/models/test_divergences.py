"""Distances between distributions of two models, worked out by hand, and in their limits."""

import math

import pytest
import torch
import torch.nn.functional as F

from lmm_r1.models.distillation import Divergence

TOKENS, VOCABULARY = 6, 11


def divergence(name: str, *, beta: float = 0.5, temperature: float = 1.0) -> Divergence:
    return Divergence(name=name, beta=beta, temperature=temperature)


def logits(seed: int, *, vocabulary: int = VOCABULARY) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(TOKENS, vocabulary, generator=generator, dtype=torch.double)


@pytest.mark.parametrize(
    ("name", "beta", "expected"),
    [
        # Of P = (3/4, 1/4), the teacher's, and Q = (1/2, 1/2).
        ("forward_kl", 0.5, 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),
        ("reverse_kl", 0.5, 0.5 * math.log(2 / 3) + 0.5 * math.log(2)),
        # M = (5/8, 3/8)
        (
            "jsd",
            0.5,
            0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3))
            + 0.5 * (0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3)),
        ),
        # M = (1/2 + 1/20, 1/2 - 1/20)
        (
            "jsd",
            0.2,
            0.2 * (0.75 * math.log(15 / 11) + 0.25 * math.log(5 / 9))
            + 0.8 * (0.5 * math.log(10 / 11) + 0.5 * math.log(10 / 9)),
        ),
    ],
)
def test_two_tokens_by_hand(name, beta, expected):
    student, teacher = torch.tensor([[0.0, 0.0]]).double(), torch.tensor([[3.0, 1.0]]).double().log()
    found = divergence(name, beta=beta).values(student, teacher)
    assert found.tolist() == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize(("beta", "limit"), [(1e-9, "forward_kl"), (1 - 1e-9, "reverse_kl")])
def test_at_its_ends_the_jensen_shannon_divergence_is_that_share_of_a_kl(beta, limit):
    student, teacher = logits(1), logits(2)
    share = min(beta, 1 - beta)
    found = divergence("jsd", beta=beta).values(student, teacher) / share
    torch.testing.assert_close(found, divergence(limit).values(student, teacher), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("name", "beta"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)])
def test_it_is_what_torch_makes_of_both_distributions(name, beta):
    student, teacher = logits(3), logits(4)
    log_q, log_p = (value.div(0.7).log_softmax(-1) for value in (student, teacher))

    def kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
        return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    mixture = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    expected = {
        "forward_kl": kl(log_p, log_q),
        "reverse_kl": kl(log_q, log_p),
        "jsd": beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture),
    }[name]
    ours = divergence(name, beta=beta, temperature=0.7)
    torch.testing.assert_close(ours.values(student, teacher), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_vocabularies_padded_to_other_sizes_are_compared_over_the_ids_of_both(name):
    student, teacher = logits(7), logits(8)
    ours = divergence(name, temperature=2.0)
    expected = ours.values(student, teacher)
    padding = torch.full((TOKENS, 3), 9.0, dtype=torch.double)
    longer = torch.cat([student, padding], dim=-1)
    torch.testing.assert_close(ours.values(student, torch.cat([teacher, padding], dim=-1)), expected)
    torch.testing.assert_close(ours.values(longer, teacher), expected)
