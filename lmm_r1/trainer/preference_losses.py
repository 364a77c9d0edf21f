"""Losses on judged responses, as pure functions of log-probs; each pair, or response by itself, has one of its own.

A response's log-ratio is log pi(y|x) - log pi_ref(y|x), summed over its tokens, or the mean of them where that is asked
for. All tensors are (B,), a pair in each place, or a response.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return -(1 - e) log s(b d) - e log s(-b d), with d = chosen - rejected of log-ratios and the sigmoid s.

    With e = `label_smoothing` 0: DPO, equation 7 of https://arxiv.org/abs/2305.18290; else conservative DPO, equation 3 of
    https://ericmitchell.ai/cdpo.pdf, for labels that are wrong with probability e.
    """
    logits = beta * (chosen - rejected)
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def ipo_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Return (d - 1 / (2 b))^2, with d = chosen - rejected of log-ratios.

    IPO, equation 17 of https://arxiv.org/abs/2310.12036, where b is called tau.
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def simpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return what `dpo_loss` does of b d - g in the place of b d, with d of the policy's mean log-probs per token.

    SimPO, equation 6 of https://arxiv.org/abs/2405.14734: without a reference, the chosen response's reward is to be
    larger by g = `gamma`.
    """
    return dpo_loss(chosen - gamma / beta, rejected, beta=beta, label_smoothing=label_smoothing)


def nll_loss(log_probs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the negative mean log-prob per token of responses; 0 for one without tokens.

    The term that is added to DPO's loss in section 4.1.4 of https://arxiv.org/abs/2407.21783, and, with other
    weights, in https://arxiv.org/abs/2404.19733.

    Args:
        log_probs: of each response, summed over its tokens.
        lengths: its tokens.
    """
    return -log_probs / lengths.clamp(min=1)


def kto_loss(
    ratios: torch.Tensor,
    desirable: torch.Tensor,
    *,
    kl: torch.Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Return w (1 - s(b (r - kl))) of desirable responses' log-ratios r, and w (1 - s(b (kl - r))) of the others.

    KTO, equation 8 of https://arxiv.org/abs/2402.01306, with the sigmoid s.

    Args:
        desirable: whether each response is to be learned, bool.
        kl: an estimate of the policy's KL divergence from the reference, not negative, (); no gradient flows into it.
    """
    logits = beta * (ratios - kl.detach())
    # 1 - s(x) = s(-x), without the loss of digits near 1.
    return torch.where(desirable, desirable_weight * F.sigmoid(-logits), undesirable_weight * F.sigmoid(logits))


def bradley_terry_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, margin: torch.Tensor | None) -> torch.Tensor:
    """Return -log s(chosen - rejected - margin) of rewards, with the sigmoid s.

    Equation 1 of https://arxiv.org/abs/2203.02155 (InstructGPT), after Bradley and Terry (1952); with a margin equation 2
    of https://arxiv.org/abs/2307.09288, section 3.2.2.
    """
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin)


def score_loss(chosen: torch.Tensor, rejected: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the mean over both responses of (reward - score)^2.

    Args:
        scores: of the chosen responses and of the rejected ones, (2, B).
    """
    return (torch.stack([chosen, rejected]) - scores).square().mean(0)
