"""Log-probs and entropies of tokens straight from hidden states: logits exist for a few tokens at a time.

With a vocabulary of 152,000, one token's logits take 0.6 MB in single precision, and a loss over them several times as
much. Here the output layer is computed chunk by chunk, and again in the backward pass, so that memory only grows with
the hidden size. A student's divergence from its teacher is computed in the same way: the teacher's pass keeps the inputs
of its output layer, and within the student's output layer come the logits of both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lmm_r1.config.supervised import DivergenceName
from lmm_r1.host.models import GatheredParameters, compute_entropy, log_probs_from_logits
from lmm_r1.lmm_kits.checkpoint import BAN_BIAS
from lmm_r1.models.packed.sequence_parallel import SequenceShare

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


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A divergence of Q from P: KL(P || Q), KL(Q || P), or the generalized Jensen-Shannon divergence of both.

    Vocabularies padded to different sizes are compared over the ids that both have; other ids are beyond the tokenizer.
    """

    name: DivergenceName
    beta: float
    """Of jsd: b KL(P || M) + (1 - b) KL(Q || M) with M = b P + (1 - b) Q, equation 1; between 0 and 1."""
    temperature: float

    def values(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each token, (k,), from logits (k, V) and (k, V')."""
        ids = min(student.shape[-1], teacher.shape[-1])
        log_q, log_p = (
            (logits[..., :ids] / self.temperature).log_softmax(-1) for logits in (student, teacher.to(student))
        )
        if self.name == "forward_kl":
            return _kl(log_p, log_q)
        if self.name == "reverse_kl":
            return _kl(log_q, log_p)
        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        return self.beta * _kl(log_p, log_m) + (1 - self.beta) * _kl(log_q, log_m)


def _kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


# For one model's logits of a chunk in single precision; about ten tensors of this size exist at a time.
DISTILLED_CHUNK_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class WantedTokens:
    """The tokens seen by an output layer that predict a target, and the places of these among all targets."""

    seen: torch.Tensor
    """Indices into the layer's flattened input, (k,)."""
    places: torch.Tensor
    """Indices into the batch's N targets, row by row, (k,); ranks that share a sequence have a part of them each."""
    count: int
    """N."""

    @classmethod
    def in_batch(cls, wanted: torch.Tensor, *, width: int, device: torch.device) -> WantedTokens:
        """Return those wanted (B, A) of padded samples, whose rows have `width` columns."""
        rows, columns = wanted.nonzero(as_tuple=True)
        seen = (rows * width + columns).to(device)
        return cls(seen=seen, places=torch.arange(len(seen), device=device), count=len(seen))

    @classmethod
    def in_share(cls, share: SequenceShare) -> WantedTokens:
        """Return those of a share of a packed sequence; of samples by themselves, the targets are in their order."""
        seen = torch.arange(len(share.places), device=share.places.device)
        return cls(seen=seen, places=share.places, count=len(share.sequence.sources))


@dataclass(frozen=True, kw_only=True)
class TeacherTokens:
    """A teacher's logits at the N targets of a batch, row by row, in the form of what they are computed from."""

    inputs: torch.Tensor
    """The inputs of its output layer, (N, H); the logits themselves, (N, V), if the model scales or caps them."""
    layer: torch.nn.Linear | None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the output layer's weight, of which ZeRO-3 keeps a part on each rank; every rank must call it."""
        with ExitStack() as stack:
            for weight in () if self.layer is None else self.layer.parameters():
                # One by one: DeepSpeed only waits for the last of several that gloo gathers together.
                stack.enter_context(GatheredParameters(weight))
            yield

    def logits(self, places: torch.Tensor) -> torch.Tensor:
        """Return the logits of some targets, (c, V), within `whole`."""
        inputs = self.inputs[places]
        return inputs if self.layer is None else linear(inputs, self.layer.weight, self.layer.bias)


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The teacher's tokens that a student is compared with, and the divergence."""

    teacher: TeacherTokens
    divergence: Divergence


@dataclass(kw_only=True)
class KeptInputs(LayerOutcomes):
    """In the teacher's pass: keeps the inputs of the output layer at the targets, and computes nothing."""

    wanted: WantedTokens
    group: dist.ProcessGroup | None
    """The ranks that share the sequence."""
    tokens: TeacherTokens | None = field(default=None, init=False)
    """After the pass."""
    has_second = False

    def of_hidden(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Keep the inputs; the returned numbers mean nothing."""
        self.tokens = TeacherTokens(inputs=self._in_order(hidden), layer=layer)
        return hidden.new_zeros(len(hidden), 2)

    def of_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the logits themselves; the returned numbers mean nothing."""
        self.tokens = TeacherTokens(inputs=self._in_order(logits.flatten(0, -2)), layer=None)
        nothing = torch.zeros_like(self.targets, dtype=logits.dtype)
        return nothing, nothing

    def _in_order(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values (T, D) of this rank's tokens at all targets (N, D), on every rank of the sequence."""
        found = values.new_zeros(self.wanted.count, values.shape[-1])
        found[self.wanted.places] = values[self.wanted.seen]
        if self.group is not None:
            dist.all_reduce(found, group=self.group)
        return found


@dataclass(kw_only=True)
class DistilledOutcomes(LayerOutcomes):
    """In the student's pass: the log-prob of each target, and the divergence from the teacher."""

    wanted: WantedTokens
    distillation: Distillation
    has_second = True

    def of_hidden(self, layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        return self._distilled(hidden, layer.weight, layer.bias)

    def of_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._distilled(logits.flatten(0, -2), None, None)
        return found[:, 0].view(self.targets.shape), found[:, 1].view(self.targets.shape)

    def _distilled(self, inputs: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Return both numbers of each token (T, 2), 0 for tokens that are no wanted targets."""
        seen = self.wanted.seen
        targets = self.targets.flatten()[seen]
        found = _Distilled.apply(inputs[seen], weight, bias, targets, self.wanted.places, self.distillation)
        return found.new_zeros(len(inputs), 2).index_put((seen,), found)


class _Distilled(torch.autograd.Function):
    """The log-prob of each token's target and the divergence from the teacher, (k, 2)."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        places: torch.Tensor,
        distillation: Distillation,
    ) -> torch.Tensor:
        found = inputs.new_zeros(len(inputs), 2, dtype=torch.promote_types(inputs.dtype, torch.float32))
        with distillation.teacher.whole():
            for tokens in _chunks(inputs, weight):
                logits = _logits(inputs[tokens], weight, bias)
                found[tokens] = _outcomes(logits, targets[tokens], places[tokens], distillation)
        ctx.save_for_backward(inputs, weight, bias, targets, places)
        ctx.distillation = distillation
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, bias, targets, places = ctx.saved_tensors
        gradients = None if weight is None else _LayerGradients(inputs, weight, bias, needed=ctx.needs_input_grad)
        of_inputs = torch.empty_like(inputs) if weight is None else None
        with ctx.distillation.teacher.whole():
            for tokens in _chunks(inputs, weight):
                logits = _logits(inputs[tokens], weight, bias).detach().requires_grad_()
                with torch.enable_grad():
                    found = _outcomes(logits, targets[tokens], places[tokens], ctx.distillation)
                (of_logits,) = torch.autograd.grad(found, logits, gradient[tokens])
                if gradients is not None:
                    gradients.add(tokens, of_logits)
                elif of_inputs is not None:
                    of_inputs[tokens] = of_logits
        summed = (of_inputs, None, None) if gradients is None else gradients.summed
        return (*summed, None, None, None)


class _LayerGradients:
    """Gradients of an output layer's input (k, H), weight and bias, from those of its logits chunk by chunk."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, needed: Sequence[bool]
    ) -> None:
        """Args: needed: for each of the three, whether its gradient is needed."""
        self.hidden, self.weight = hidden, weight
        # Summed over chunks in single precision at least, as in one product over all tokens.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.of_hidden = torch.empty_like(hidden) if needed[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.of_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add(self, tokens: slice, of_logits: torch.Tensor) -> None:
        of_logits = of_logits.to(self.weight.dtype)
        if self.of_hidden is not None:
            self.of_hidden[tokens] = of_logits @ self.weight
        if self.of_weight is not None:
            self.of_weight += of_logits.t() @ self.hidden[tokens]
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0)

    @property
    def summed(self) -> tuple[torch.Tensor | None, ...]:
        """All three in the weight's precision; None for those that are not needed."""
        found = (self.of_hidden, self.of_weight, self.of_bias)
        return tuple(None if gradient is None else gradient.to(self.weight.dtype) for gradient in found)


def _chunks(inputs: torch.Tensor, weight: torch.Tensor | None) -> Iterator[slice]:
    vocabulary = inputs.shape[-1] if weight is None else len(weight)
    size = max(1, DISTILLED_CHUNK_BYTES // (4 * vocabulary))
    for start in range(0, len(inputs), size):
        yield slice(start, start + size)


def _logits(inputs: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    logits = inputs if weight is None else linear(inputs, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _outcomes(
    logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor, distillation: Distillation
) -> torch.Tensor:
    """Return the log-prob of each target and the divergence from the teacher, (c, 2), from the student's logits."""
    log_probs = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    teacher = distillation.teacher.logits(places)
    return torch.stack([log_probs, distillation.divergence.values(logits, teacher)], dim=-1)
