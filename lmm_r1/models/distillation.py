"""A student's divergence from its teacher, token by token; logits exist for a few tokens at a time.

The teacher's pass keeps the inputs of its output layer. Within the student's output layer, the logits of both are
computed chunk by chunk, and again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lmm_r1.config.supervised import DivergenceName
from lmm_r1.host.models import GatheredParameters
from lmm_r1.models.output_layer import LayerOutcomes
from lmm_r1.models.packed.sequence_parallel import SequenceShare


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
CHUNK_BYTES = 2**26


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
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
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
