"""Log-probs and entropies of tokens straight from hidden states: logits exist for a few tokens at a time.

With a vocabulary of 152,000, one token's logits take 0.6 MB in single precision, and a loss over them several times as
much. Here the output layer is computed chunk by chunk, and again in the backward pass, so that memory only grows with
the hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lmm_r1.lmm_kits.checkpoint import BAN_BIAS

# For the logits of one chunk in single precision; about four tensors of this size exist at a time.
CHUNK_BYTES = 2**27
# The number of slices to compute, None for all: see `two_slices`.
_computed: ContextVar[int | None] = ContextVar("computed", default=None)


@dataclass(frozen=True, kw_only=True)
class TokenDistribution:
    """The distribution that the rollout samples from, given logits."""

    temperature: float
    banned_token_ids: torch.Tensor
    cap: float | None = None
    """What an output layer's product is capped at before tokens are banned: cap * tanh(product / cap)."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of the distribution that is sampled from, in single precision at least."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if len(self.banned_token_ids):
            logits = ban(logits, self.banned_token_ids)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def shift(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bias (V,) of an output layer's product; it bans tokens unless a cap would undo that."""
        if not len(self.banned_token_ids) or self.cap is not None:
            return bias
        return ban(weight.new_zeros(len(weight)) if bias is None else bias, self.banned_token_ids)

    def of_product(self, product: torch.Tensor, *, words: slice = slice(None)) -> torch.Tensor:
        """Return the logits of the distribution, in memory of their own, from an output layer's product with its shift.

        Args:
            words: which part of the vocabulary the product (k, v) is for.
        """
        wide = product.to(torch.promote_types(product.dtype, torch.float32))
        if self.cap is not None:
            wide = wide.div_(self.cap).tanh_().mul_(self.cap)
            if len(self.banned_token_ids):
                places = self.banned_token_ids.to(wide.device) - (words.start or 0)
                wide[:, places[(places >= 0) & (places < wide.shape[1])]] += BAN_BIAS
        return wide if self.temperature == 1.0 else wide.div_(self.temperature)

    def slope(self, product: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of `of_product` by the product."""
        if self.cap is None:
            return 1 / self.temperature
        wide = product.to(torch.promote_types(product.dtype, torch.float32))
        return (wide / self.cap).tanh_().square_().neg_().add_(1).div_(self.temperature)


def ban(logits: torch.Tensor, banned_token_ids: torch.Tensor) -> torch.Tensor:
    """Return logits (..., V) in which banned tokens (K,) have no probability, as in the engine."""
    bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    bias[banned_token_ids.to(logits.device)] = BAN_BIAS
    return logits + bias


class _TokenOutcomes(torch.autograd.Function):
    """The log-prob of each token's target and the entropy of its distribution, (k, 2).

    The forward pass goes over chunks of tokens. The backward pass knows each token's log-sum-exp, so it goes over slices
    of the vocabulary instead: each slice of the weight's gradient is one product over all tokens. Chunks of tokens would
    each add to a gradient of the whole weight, in single precision.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        sampler: TokenDistribution,
        entropy: bool,
    ) -> torch.Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        outcomes = hidden.new_zeros(len(hidden), 2, dtype=dtype)
        lse = hidden.new_empty(len(hidden), dtype=dtype)
        shift = sampler.shift(weight, bias)
        for tokens in _slices(len(hidden), of=len(weight)):
            logits = sampler.of_product(linear(hidden[tokens], weight, shift))
            lse[tokens] = logits.logsumexp(-1)
            outcomes[tokens, 0] = logits.gather(-1, targets[tokens, None])[:, 0] - lse[tokens]
            if entropy:
                # Logits of minus infinity have no probability and add nothing.
                logits -= lse[tokens, None]
                outcomes[tokens, 1] = torch.special.entr(logits.exp_()).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, outcomes)
        ctx.sampler, ctx.entropy = sampler, entropy
        return outcomes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, lse, outcomes = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        # Summed over slices in single precision at least, as in one product over the whole vocabulary.
        of_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if for_hidden else None
        of_weight = torch.empty_like(weight) if for_weight else None
        of_bias = torch.empty_like(bias) if for_bias else None
        shift = ctx.sampler.shift(weight, bias)
        of_log_prob, of_entropy = gradient[:, :1], gradient[:, 1:]
        for words in _slices(len(weight), of=len(hidden)):
            part = weight[words]
            product = linear(hidden, part, None if shift is None else shift[words])
            slope = ctx.sampler.slope(product)
            log_probs = ctx.sampler.of_product(product, words=words).sub_(lse[:, None])  # (k, v)
            if ctx.entropy:
                # dH / dx_j = -p_j (log p_j + H)
                scale = (log_probs + outcomes[:, 1:]).nan_to_num_(neginf=0.0).mul_(of_entropy).add_(of_log_prob)
                products = log_probs.exp_().mul_(scale.neg_())
            else:
                products = log_probs.exp_().mul_(-of_log_prob)
            places = targets[:, None] - words.start
            inside = (places >= 0) & (places < len(part))
            products.scatter_add_(1, places.clamp(0, len(part) - 1), of_log_prob * inside)
            of_logits = products.mul_(slope).to(weight.dtype)
            if of_hidden is not None:
                of_hidden += of_logits @ part
            if of_weight is not None:
                of_weight[words] = of_logits.t() @ hidden
            if of_bias is not None:
                of_bias[words] = of_logits.sum(0)
        return (None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, *(None,) * 3)


def _slices(length: int, *, of: int) -> Iterator[slice]:
    """Yield slices of tokens, or of the vocabulary, whose logits with `of` others fit into `CHUNK_BYTES`."""
    size = max(1, CHUNK_BYTES // (4 * max(1, of)))
    for start in range(0, length, size)[: _computed.get()]:
        yield slice(start, start + size)


@contextmanager
def two_slices() -> Iterator[None]:
    """Compute only the first two slices of each product, with the memory peak of all; the results are wrong."""
    token = _computed.set(2)
    try:
        yield
    finally:
        _computed.reset(token)


@dataclass(kw_only=True)
class LayerOutcomes(ABC):
    """Two numbers per token, which the output layer computes instead of logits within `token_outcomes`."""

    takes_cap: ClassVar[bool] = False
    """Whether `of_hidden` caps the logits of a model that would cap them itself."""
    targets: torch.Tensor
    """The token that each position predicts, in the shape of the output layer's input without its last dimension."""
    _given: torch.Tensor | None = field(default=None, init=False)
    _version: int = field(default=0, init=False)

    @property
    @abstractmethod
    def has_second(self) -> bool:
        """Whether the second number was requested; otherwise it is 0."""

    @abstractmethod
    def of_hidden(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Return both numbers of each token, (k, 2), from the input of the output layer, (k, H)."""

    @abstractmethod
    def of_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both numbers, each in the targets' shape, for a model that scales or caps its logits."""

    def compute(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Return both numbers instead of the logits, (..., 2)."""
        self._given = self.of_hidden(layer, hidden.flatten(0, -2)).view(*hidden.shape[:-1], 2)
        self._version = self._given._version
        return self._given

    def of(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return both numbers from a model's output; None if the model changes its logits."""
        given = self._given
        assert given is not None, "a causal model calls its output layer"
        # Hooks of ZeRO-3 return the same memory as another tensor.
        if logits.shape != given.shape or logits.data_ptr() != given.data_ptr():
            return None
        if logits._version != self._version:
            return None
        return logits[..., 0], logits[..., 1]


@dataclass(kw_only=True)
class TokenOutcomes(LayerOutcomes):
    """The log-prob of each target, and the entropy of the distribution that it is sampled from."""

    sampler: TokenDistribution
    entropy: bool
    takes_cap = True

    @property
    def has_second(self) -> bool:
        return self.entropy

    def of_hidden(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        return _TokenOutcomes.apply(
            hidden, layer.weight, layer.bias, self.targets.flatten(), self.sampler, self.entropy
        )

    def of_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Imported here, because chunks and the GPU checks work without OpenRLHF.
        from lmm_r1.host.models import compute_entropy, log_probs_from_logits

        logits = self.sampler(logits)
        log_probs = log_probs_from_logits(logits, self.targets)
        return log_probs, compute_entropy(logits) if self.entropy else torch.zeros_like(log_probs)


@contextmanager
def token_outcomes(layer: torch.nn.Linear, outcomes: LayerOutcomes) -> Iterator[None]:
    """Make an output layer compute two numbers per token instead of logits.

    Its module is still called, so that ZeRO-3 gathers and releases its weight, also in the backward pass.
    """
    # The instance's attribute hides the method of the class.
    vars(layer)["forward"] = partial(outcomes.compute, layer)
    try:
        yield
    finally:
        del vars(layer)["forward"]
