"""Log-probs and entropies without logits, against what autograd makes of all logits at once."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.packed_batches import ShapeLog
from torch.utils._python_dispatch import TorchDispatchMode

from lmm_r1.models import output_layer
from lmm_r1.models.output_layer import TokenDistribution, TokenOutcomes, token_outcomes, two_slices
from lmm_r1.tools.planning.pass_memory import LiveMemory

TOKENS, HIDDEN, VOCABULARY = 23, 5, 41


@dataclass(frozen=True, kw_only=True)
class Results:
    values: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


def results(
    run: Callable[[torch.nn.Linear, torch.Tensor], torch.Tensor], *, bias: bool, dtype: torch.dtype
) -> Results:
    """Values (2, K) of a random layer and hidden states, and the gradients of their weighted sum."""
    generator = torch.Generator().manual_seed(4)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.double)  # noqa: E731
    layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    hidden = random(1, TOKENS, HIDDEN).to(dtype).requires_grad_()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(random(*weight.shape))
    values = run(layer, hidden)
    (values * random(2, TOKENS)).sum().backward()
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    return Results(values=values.detach(), gradients={"hidden": hidden.grad, **gradients})


TARGETS = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def from_logits(
    sampler: TokenDistribution, *, entropy: bool
) -> Callable[[torch.nn.Linear, torch.Tensor], torch.Tensor]:
    def run(layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        logits = layer(hidden)
        if sampler.cap is not None:
            logits = sampler.cap * torch.tanh(logits / sampler.cap)
        table = sampler(logits).log_softmax(-1)
        log_probs = table.gather(-1, TARGETS[..., None])[..., 0]
        entropies = -(table.exp() * table).sum(-1) if entropy else torch.zeros_like(log_probs)
        return torch.cat([log_probs, entropies])

    return run


def from_hidden(
    sampler: TokenDistribution, *, entropy: bool
) -> Callable[[torch.nn.Linear, torch.Tensor], torch.Tensor]:
    def run(layer: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        outcomes = TokenOutcomes(targets=TARGETS, sampler=sampler, entropy=entropy)
        with token_outcomes(layer, outcomes):
            found = outcomes.of(layer(hidden))
        assert found is not None
        return torch.cat(found)

    return run


@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("banned", [[], [3, 40]])
@pytest.mark.parametrize(
    ("temperature", "entropy", "cap"),
    [(1.0, True, None), (0.7, True, None), (2.5, False, None), (1.0, False, 1.5), (0.7, True, 1.5)],
)
def test_values_and_gradients_are_those_of_the_logits(monkeypatch, chunk, bias, banned, temperature, entropy, cap):
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", chunk * 4 * VOCABULARY)
    sampler = TokenDistribution(
        temperature=temperature, banned_token_ids=torch.tensor(banned, dtype=torch.long), cap=cap
    )
    expected, found = (
        results(way(sampler, entropy=entropy), bias=bias, dtype=torch.double) for way in (from_logits, from_hidden)
    )
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-12)
    assert found.gradients.keys() == expected.gradients.keys() == {"hidden", "weight", *(["bias"] if bias else [])}
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=0, atol=1e-12, msg=name)


def test_half_precision_rounds_the_logits_alone(monkeypatch):
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 5 * 4 * VOCABULARY)
    sampler = TokenDistribution(temperature=1.0, banned_token_ids=torch.tensor([], dtype=torch.long))
    expected, found = (
        results(way(sampler, entropy=True), bias=False, dtype=torch.bfloat16) for way in (from_logits, from_hidden)
    )
    assert found.values.dtype is torch.float32
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=2e-6)
    for name, gradient in found.gradients.items():
        assert gradient.dtype is torch.bfloat16
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=2**-6, atol=2**-6)


def test_the_gradient_of_the_weight_is_written_once_and_never_added_up(monkeypatch):
    """Of 23 tokens and 41 words in slices of 7 words: one product of 7 x 5 for each, and no sum of 41 x 5."""
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 7 * 4 * TOKENS)
    sampler = TokenDistribution(temperature=1.0, banned_token_ids=torch.tensor([2]))
    made: Counter[tuple[str, tuple[int, ...]]] = Counter()

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor):
                made[func._schema.name, tuple(output.shape)] += 1
            return output

    with Log():
        results(from_hidden(sampler, entropy=False), bias=False, dtype=torch.bfloat16)
    assert made["aten::mm", (7, HIDDEN)] == VOCABULARY // 7
    assert made["aten::mm", (VOCABULARY % 7, HIDDEN)] == 1
    assert not made["aten::add_", (VOCABULARY, HIDDEN)]
    assert not made["aten::mm", (VOCABULARY, HIDDEN)]


def test_no_tensor_of_all_tokens_and_the_vocabulary_is_made(monkeypatch):
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 4 * 4 * VOCABULARY)
    sampler = TokenDistribution(temperature=0.7, banned_token_ids=torch.tensor([2]))
    sizes = {}
    for way in (from_logits, from_hidden):
        with ShapeLog() as log:
            results(way(sampler, entropy=True), bias=True, dtype=torch.float)
        sizes[way] = max(torch.Size(shape).numel() for shape in log.shapes)
    assert sizes[from_logits] == TOKENS * VOCABULARY
    # A chunk's logits, or the layer's weight.
    assert sizes[from_hidden] == max(4 * VOCABULARY, HIDDEN * VOCABULARY)


@pytest.mark.parametrize(
    "change", [lambda logits: logits * 2, lambda logits: logits.mul_(2), lambda logits: logits[:1, 1:]]
)
def test_what_a_model_makes_of_its_logits_is_noticed(change: Callable[[torch.Tensor], Any]):
    sampler = TokenDistribution(temperature=1.0, banned_token_ids=torch.tensor([], dtype=torch.long))
    outcomes = TokenOutcomes(targets=TARGETS, sampler=sampler, entropy=False)
    layer, hidden = torch.nn.Linear(HIDDEN, VOCABULARY), torch.randn(1, TOKENS, HIDDEN)
    with torch.no_grad(), token_outcomes(layer, outcomes):
        given = layer(hidden)
    assert outcomes.of(given.detach()) is not None
    with torch.no_grad():
        assert outcomes.of(change(given)) is None
    assert layer(hidden).shape == (1, TOKENS, VOCABULARY), "the layer is itself again"


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_the_peak_of_two_slices_is_that_of_all(monkeypatch, entropy, dtype):
    """Ten tokens a chunk and 17 words a slice; of both there are three."""
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 10 * 4 * VOCABULARY)
    sampler = TokenDistribution(temperature=0.7, banned_token_ids=torch.tensor([2]))
    peaks = {}
    for slices in (nullcontext, two_slices):
        with slices(), LiveMemory() as memory, ShapeLog() as log:
            results(from_hidden(sampler, entropy=entropy), bias=False, dtype=dtype)
        peaks[slices] = memory.peak
        assert ((TOKENS - 20, VOCABULARY) in log.shapes) == (slices is nullcontext)
    assert peaks[two_slices] == peaks[nullcontext] > 0
