"""How far a student's distributions over tokens are from a teacher's, with gradients for the student's logits.

P is the teacher's and Q the student's, both softmaxes of logits over a temperature: section 3 of
https://arxiv.org/abs/2306.13649 (GKD).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lmm_r1.config.kd import DivergenceName


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A divergence of Q from P: KL(P || Q), KL(Q || P), or the generalized Jensen-Shannon divergence of both.

    Vocabularies padded to different sizes are compared over the ids that both have; the rest is beyond the tokenizer.
    """

    name: DivergenceName
    beta: float
    """Of jsd: b KL(P || M) + (1 - b) KL(Q || M) with M = b P + (1 - b) Q, equation 1; between 0 and 1."""
    temperature: float

    def values(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each token, (k,), from logits (k, V) and (k, V')."""
        log_q, log_p = self._log_probs(student, teacher)
        if self.name == "forward_kl":
            return _kl(log_p, log_q)
        if self.name == "reverse_kl":
            return _kl(log_q, log_p)
        log_m = self._mixture(log_q, log_p)
        return self.beta * _kl(log_p, log_m) + (1 - self.beta) * _kl(log_q, log_m)

    def gradients(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return those of `values` with respect to the student's logits, (k, V).

        With x the logits over the temperature and f = dD / dQ: dD / dx_j = Q_j (f_j - sum_i Q_i f_i).
        """
        log_q, log_p = self._log_probs(student, teacher)
        if self.name == "forward_kl":
            of_logits = log_q.exp_().sub_(log_p.exp_())
        else:
            if self.name == "reverse_kl":
                slopes = log_q - log_p
            else:
                slopes = (log_q - self._mixture(log_q, log_p)).mul_(1 - self.beta)
            q = log_q.exp_()
            of_logits = slopes.sub_((q * slopes).sum(-1, keepdim=True)).mul_(q)
        beyond = student.shape[-1] - of_logits.shape[-1]
        return torch.nn.functional.pad(of_logits, (0, beyond)).div_(self.temperature)

    def _log_probs(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log Q and log P over the ids that both have."""
        ids = min(student.shape[-1], teacher.shape[-1])
        log_q, log_p = (
            (logits[..., :ids] / self.temperature).log_softmax(-1) for logits in (student, teacher.to(student))
        )
        return log_q, log_p

    def _mixture(self, log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        return torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))


def _kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Return KL(A || B) over the last dimension."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)
