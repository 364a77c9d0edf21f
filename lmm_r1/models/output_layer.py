"""Log-probs and entropies of tokens straight from hidden states: logits exist for a few tokens at a time.

A vocabulary of 152,000 makes 0.6 MB of logits a token in single precision, and a loss over them several times as much.
Here the output layer is computed chunk by chunk, and again in the backward pass, so that memory grows with the hidden
size alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lmm_r1.lmm_kits.checkpoint import BAN_BIAS

# Of the logits of one chunk in single precision; some four tensors of the size are held at a time.
CHUNK_BYTES = 2**27


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How the rollout makes a distribution of logits."""

    temperature: float
    banned_token_ids: torch.Tensor

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of the distribution that is sampled from, in single precision at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if len(self.banned_token_ids):
            logits = ban(logits, self.banned_token_ids)
        return logits if self.temperature == 1.0 else logits / self.temperature


def ban(logits: torch.Tensor, banned_token_ids: torch.Tensor) -> torch.Tensor:
    """Return logits (..., V) in which banned tokens (K,) have no probability, as in the engine."""
    bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    bias[banned_token_ids.to(logits.device)] = BAN_BIAS
    return logits + bias


@contextmanager
def only_tokens(layer: torch.nn.Linear, token_ids: torch.Tensor) -> Iterator[None]:
    """Let an output layer compute the logits of a few tokens of the vocabulary alone, (K,), in their order.

    As in `token_outcomes`, its module is still called.
    """

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, layer.weight[token_ids], None if layer.bias is None else layer.bias[token_ids])

    vars(layer)["forward"] = compute
    try:
        yield
    finally:
        del vars(layer)["forward"]


class _TokenOutcomes(torch.autograd.Function):
    """Of each token (k,) the log-prob of its target and the entropy of its distribution, (k, 2)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        sampler: Sampler,
        entropy: bool,
        chunk: int,
    ) -> torch.Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        outcomes = hidden.new_zeros(len(hidden), 2, dtype=dtype)
        lse = hidden.new_empty(len(hidden), dtype=dtype)
        for start in range(0, len(hidden), chunk):
            tokens = slice(start, start + chunk)
            logits = sampler(linear(hidden[tokens], weight, bias))
            lse[tokens] = logits.logsumexp(-1)
            outcomes[tokens, 0] = logits.gather(-1, targets[tokens, None])[:, 0] - lse[tokens]
            if entropy:
                # Of what has no probability, minus infinity included, there is none.
                logits -= lse[tokens, None]
                outcomes[tokens, 1] = torch.special.entr(logits.exp_()).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, outcomes)
        ctx.sampler, ctx.entropy, ctx.chunk = sampler, entropy, chunk
        return outcomes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, lse, outcomes = ctx.saved_tensors
        gradients = LayerGradients(hidden, weight, bias, needed=ctx.needs_input_grad)
        for start in range(0, len(hidden), ctx.chunk):
            tokens = slice(start, start + ctx.chunk)
            log_probs = ctx.sampler(linear(hidden[tokens], weight, bias)) - lse[tokens, None]  # (c, V)
            probs = log_probs.exp()
            of_log_prob, of_entropy = gradient[tokens, :1], gradient[tokens, 1:]
            if ctx.entropy:
                # dH / dx_j = -p_j (log p_j + H)
                scale = (log_probs + outcomes[tokens, 1:]).nan_to_num_(neginf=0.0).mul_(of_entropy).add_(of_log_prob)
            else:
                scale = of_log_prob
            of_logits = probs.mul_(scale).neg_().scatter_add_(1, targets[tokens, None], of_log_prob)
            gradients.add(tokens, of_logits / ctx.sampler.temperature)
        return (*gradients.summed, *(None,) * 4)


class LayerGradients:
    """Gradients of an output layer's input (k, H), weight and bias, from those of its logits chunk by chunk."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, needed: Sequence[bool]
    ) -> None:
        """Args: needed: whether gradients are asked for, of each of the three."""
        self.hidden, self.weight = hidden, weight
        # Summed over chunks in single precision at least, as one product over all tokens sums them.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.of_hidden = torch.empty_like(hidden) if needed[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.of_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add(self, tokens: slice, of_logits: torch.Tensor) -> None:
        """Add what the logits (c, V) of some tokens make of them."""
        of_logits = of_logits.to(self.weight.dtype)
        if self.of_hidden is not None:
            self.of_hidden[tokens] = of_logits @ self.weight
        if self.of_weight is not None:
            self.of_weight += of_logits.t() @ self.hidden[tokens]
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0)

    @property
    def summed(self) -> tuple[torch.Tensor | None, ...]:
        """All three, in the weight's precision; None for what is not needed."""
        found = (self.of_hidden, self.of_weight, self.of_bias)
        return tuple(None if gradient is None else gradient.to(self.weight.dtype) for gradient in found)


@dataclass(kw_only=True)
class LayerOutcomes(ABC):
    """What a forward pass within `token_outcomes` gave for each token that its output layer saw: two numbers."""

    targets: torch.Tensor
    """The token that each of them predicts, of the shape of the output layer's input without its last dimension."""
    _given: torch.Tensor | None = field(default=None, init=False)
    _version: int = field(default=0, init=False)

    @property
    @abstractmethod
    def has_second(self) -> bool:
        """Whether the second number was asked for; else it is 0."""

    @abstractmethod
    def of_hidden(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Return both numbers of each token, (k, 2), from what the output layer gets, (k, H)."""

    @abstractmethod
    def of_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both numbers, each of the targets' shape, from the logits of a model that scales or caps them."""

    def compute(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Return both numbers in the place of the logits, (..., 2)."""
        self._given = self.of_hidden(layer, hidden.flatten(0, -2)).view(*hidden.shape[:-1], 2)
        self._version = self._given._version
        return self._given

    def of(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return both numbers from a model's output; None where it makes something else of its logits."""
        given = self._given
        assert given is not None, "a causal model calls its output layer"
        # Hooks of ZeRO-3 hand on the same memory as another tensor.
        if logits.shape != given.shape or logits.data_ptr() != given.data_ptr():
            return None
        if logits._version != self._version:
            return None
        return logits[..., 0], logits[..., 1]


@dataclass(kw_only=True)
class TokenOutcomes(LayerOutcomes):
    """The log-prob of each target, and the entropy of the distribution that it is drawn from."""

    sampler: Sampler
    entropy: bool

    @property
    def has_second(self) -> bool:
        """Whether entropies were asked for."""
        return self.entropy

    def of_hidden(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Return log-probs and entropies, (k, 2)."""
        chunk = max(1, CHUNK_BYTES // (4 * len(layer.weight)))
        return _TokenOutcomes.apply(
            hidden, layer.weight, layer.bias, self.targets.flatten(), self.sampler, self.entropy, chunk
        )

    def of_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies."""
        # Here, since chunks need no OpenRLHF, nor do the GPU checks.
        from openrlhf.models.utils import compute_entropy, log_probs_from_logits

        logits = self.sampler(logits)
        log_probs = log_probs_from_logits(logits, self.targets)
        return log_probs, compute_entropy(logits) if self.entropy else torch.zeros_like(log_probs)


@contextmanager
def token_outcomes(layer: torch.nn.Linear, outcomes: LayerOutcomes) -> Iterator[None]:
    """Let an output layer compute two numbers of each token in the place of logits.

    Its module is still called, so that ZeRO-3 gathers its weight and gives it back, in the backward pass as well.
    """
    # In the instance, where it comes before the class's own.
    vars(layer)["forward"] = partial(outcomes.compute, layer)
    try:
        yield
    finally:
        del vars(layer)["forward"]
