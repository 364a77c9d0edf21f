"""Batches of samples and trees of episodes, actors that run them padded or packed, and how their results are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from helpers.double_precision import in_double
from helpers.engines import disturb
from helpers.tiny_models import make_actor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lmm_r1.data.sample import PlacedMedia, SampleMedia, placed
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.models.actor import KitActor
from lmm_r1.models.packed.layout import PackedSegment
from lmm_r1.models.packed.packing import ModelSample, stacked


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and what follows it; `loss_mask` says which of the latter the loss takes."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    media: SampleMedia

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.response]


@dataclass(frozen=True, eq=False)
class Batch:
    samples: tuple[Sample, ...]

    @property
    def for_model(self) -> list[ModelSample]:
        """Return the samples as a model computes them; those of one prompt are a group."""
        media = ([item.key for item in placed(one.media) if item.start < len(one.prompt)] for one in self.samples)
        known = [(sample.prompt, keys) for sample, keys in zip(self.samples, media, strict=True)]
        return [
            ModelSample(
                token_ids=torch.tensor(sample.token_ids),
                loss_mask=torch.tensor([*(False,) * (len(sample.prompt) - 1), *sample.loss_mask]),
                media=sample.media,
                group=known.index(prompt),
                prompt_tokens=len(sample.prompt),
            )
            for sample, prompt in zip(self.samples, known, strict=True)
        ]

    @property
    def wanted(self) -> torch.Tensor:
        """Of which tokens numbers are wanted, (B, A)."""
        return stacked(self.for_model, lambda sample: sample.loss_mask)

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        """The weight of each loss token in the loss, drawn at random, so that no gradients cancel out."""
        generator = torch.Generator().manual_seed(7)
        return [
            torch.randn(sum(sample.loss_mask), generator=generator, dtype=torch.float64) for sample in self.samples
        ]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a model computes for the loss tokens of a batch, and the gradients of their weighted sum."""

    log_probs: list[torch.Tensor]  # one (L,) per sample
    entropies: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def segments_of(*nodes: tuple[int, int | None]) -> tuple[PackedSegment, ...]:
    """Segments behind one another, each of so many tokens and with the number of the one that it goes on from."""
    ends = list(accumulate(length for length, _ in nodes))
    return tuple(
        PackedSegment(start=end - length, end=end, prefix=prefix)
        for end, (length, prefix) in zip(ends, nodes, strict=True)
    )


def groups(prompts: Sequence[EncodedPrompt], lengths: Sequence[Sequence[int]], *, gap: bool = False) -> list[Sample]:
    """Return for every prompt as many samples as it has lengths, each with a random response of that length.

    With `gap`, the third and fourth token of responses are no loss tokens, as those of a tool.
    """
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            prompt=tuple(prompt.token_ids),
            # No special tokens of any tiny vocabulary.
            response=tuple(torch.randint(20, 60, (length,), generator=generator).tolist()),
            loss_mask=tuple(not (gap and index in (2, 3)) for index in range(length)),
            media=prompt.media,
        )
        for prompt, own in zip(prompts, lengths, strict=True)
        for length in own
    ]


def shuffled(samples: Sequence[Sample]) -> Batch:
    """Return the samples in an order in which groups do not stand together."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(3)).tolist()
    return Batch(tuple(samples[index] for index in order))


def one_by_one(actor: KitActor, batch: Batch) -> Results:
    """Run every sample by itself, without padding."""
    parts = [Batch((sample,)) for sample in batch.samples]
    return _results(actor, batch, lambda: [outputs for part in parts for outputs in _run(actor, part)])


def together(actor: KitActor, batch: Batch) -> Results:
    """Run the batch, which the actor may pack."""
    return _results(actor, batch, lambda: _run(actor, batch))


def log_probs_of(actor: KitActor, batch: Batch, *, grad: bool = False) -> list[torch.Tensor]:
    """Return the log-probs of each sample's loss tokens, (L,) each."""
    with torch.set_grad_enabled(grad):
        return [log_probs.detach() for log_probs, _ in _run(actor, batch)]


def _run(actor: KitActor, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log-probs and entropies of each sample's loss tokens."""
    # OpenRLHF's entropy is compiled, which takes a C++ compiler half a minute.
    with torch.compiler.set_stance("force_eager"):
        log_probs, output = actor(batch.for_model, return_output=True, return_entropy=True)
    wanted = batch.wanted
    assert torch.count_nonzero(log_probs[~wanted]) == 0
    return [(log_probs[row][mask], output.entropy[row][mask]) for row, mask in enumerate(wanted)]


def _results(actor: KitActor, batch: Batch, run: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]) -> Results:
    actor.zero_grad()
    outputs = run()
    weighted = [(values * weight.to(values)).sum() for (values, _), weight in zip(outputs, batch.weights, strict=True)]
    torch.stack(weighted).sum().backward()
    gradients = {name: weight.grad for name, weight in actor.model.named_parameters() if weight.grad is not None}
    actor.zero_grad()
    return Results(
        log_probs=[log_probs.detach() for log_probs, _ in outputs],
        entropies=[entropy.detach() for _, entropy in outputs],
        gradients=gradients,
    )


class DoubleThroughout(TorchFunctionMode):
    """Keeps double precision where a model computes in single precision whatever it gets, as norms do."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        lifted = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*lifted, **named)


class ShapeLog(TorchDispatchMode):
    """Notes the shape of every tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else [output]:
            if isinstance(value, torch.Tensor):
                self.shapes.add(tuple(value.shape))
        return output


def turns(prompt: EncodedPrompt, *parts: tuple[int, ...] | EncodedPrompt) -> Sample:
    """Return a sample whose response is made of generated tokens and of observations, each with its own media."""
    response, loss_mask = [], []
    media = [] if prompt.media is None else [PlacedMedia(0, prompt.media)]
    for part in parts:
        if isinstance(part, EncodedPrompt):
            start = len(prompt.token_ids) + len(response)
            if part.media is not None:
                media.append(PlacedMedia(start, part.media, end=start + len(part.token_ids)))
        ids = part if isinstance(part, tuple) else part.token_ids
        response += ids
        loss_mask += [isinstance(part, tuple)] * len(ids)
    return Sample(
        prompt=tuple(prompt.token_ids), response=tuple(response), loss_mask=tuple(loss_mask), media=tuple(media)
    )


# Largest difference of a log-prob or entropy; of a gradient, relative to its norm. Some 40 operations in a row, each a sum
# of up to 339 terms (the vocabulary), round by sqrt(40 x 339) x eps in the mean: 7e-6 in fp32, 1.3e-14 in fp64.
SINGLE = 1e-5
DOUBLE = 1e-12
# Of a gradient that is zero but for rounding (that of a bias of attention's keys), relative to the norm of them all.
ZERO = 1e-7


@dataclass(frozen=True, kw_only=True)
class Actors:
    """The same weights with stock attention, which runs samples one by one or padded, and with packed sequences."""

    stock: KitActor
    packing: KitActor

    @contextmanager
    def running(self, way: str, *, mode: str = "eval") -> Iterator[KitActor]:
        actor = self.stock if way == "padded" else self.packing
        actor.share_prefix = way == "shared"
        actor.train(mode == "train")
        yield actor
        actor.eval()

    @contextmanager
    def in_double_precision(self) -> Iterator[None]:
        for actor in (self.stock, self.packing):
            in_double(actor.model)
        with DoubleThroughout():
            yield
        for actor in (self.stock, self.packing):
            actor.model.float()


def make_actors(folder: Path, **settings: Any) -> Actors:
    settings = {"temperature": 0.8, "ban_media_tokens": True, **settings}
    stock, packing = make_actor(folder, **settings), make_actor(folder, packing_samples=True, **settings)
    # Some weights start at zero: those of Gemma 3's projector, without which images do not matter, and of adapters.
    disturb(stock, seed=1)
    packing.model.load_state_dict(stock.model.state_dict())
    assert (stock.packing_samples, packing.packing_samples) == (False, True)
    return Actors(stock=stock, packing=packing)


def zeros(gradients: dict[str, torch.Tensor]) -> set[str]:
    """Return the parameters whose gradient, in double precision, is zero but for rounding."""
    return {name for name, gradient in gradients.items() if gradient.norm() < DOUBLE * norm_of(gradients)}


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item()


def check(mine: Results, theirs: Results, *, tolerance: float, zero: set[str]) -> None:
    """Compare what both have; which parameters have a gradient at all is for the test to say."""
    for values, others in ((mine.log_probs, theirs.log_probs), (mine.entropies, theirs.entropies)):
        for one, other in zip(values, others, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=0)
    total = norm_of(theirs.gradients)
    for name, gradient in mine.gradients.items():
        error = (gradient.double() - theirs.gradients[name].double()).norm()
        assert error <= (ZERO * total if name in zero else tolerance * theirs.gradients[name].double().norm()), name


def fork(prompt: EncodedPrompt, seen: EncodedPrompt, other: EncodedPrompt) -> Batch:
    """Return a tree that has all there may be: shared pictures, turns that part within, beginnings, repetitions."""
    first, second = (30, 31, 32), (33, 34)
    return shuffled(
        [
            turns(prompt, first, seen, second, other, (35, 36)),
            turns(prompt, first, seen, second, other, (35, 37, 38)),
            # The same picture and then another turn; another picture behind the same turn.
            turns(prompt, first, seen, (39,)),
            turns(prompt, first, other, second),
            # It parts within the first turn, at the first token, and not at all.
            turns(prompt, (30, 31, 40), seen, second),
            turns(prompt, (41, 42)),
            turns(prompt, first, seen, second),
            turns(prompt, first, seen, second),
        ]
    )
