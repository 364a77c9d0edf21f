"""Batches of groups for tests of packing, and what a model computes for their samples, one by one or together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lmm_r1.data.sample import PlacedMedia, SampleMedia
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.models.actor import KitActor

# A token that means something stands for padding: it would show if it were read.
PADDING = 7


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


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What an actor is called with for a padded batch."""

    sequences: torch.Tensor  # (B, T)
    action_mask: torch.Tensor  # (B, T - 1)
    attention_mask: torch.Tensor  # (B, T)
    media: list[SampleMedia]


@dataclass(frozen=True, eq=False)
class Batch:
    samples: tuple[Sample, ...]

    def padded(self, side: str) -> Arguments:
        """Return the batch with its padding on the given side."""
        width = max(len(sample.token_ids) for sample in self.samples)
        sequences = torch.full((len(self.samples), width), PADDING)
        mask, loss_mask = torch.zeros(2, len(self.samples), width, dtype=torch.long)
        for row, sample in enumerate(self.samples):
            length = len(sample.token_ids)
            start = 0 if side == "right" else width - length
            sequences[row, start : start + length] = torch.tensor(sample.token_ids)
            mask[row, start : start + length] = 1
            loss_mask[row, start + len(sample.prompt) : start + length] = torch.tensor(sample.loss_mask)
        media = [sample.media for sample in self.samples]
        return Arguments(sequences=sequences, action_mask=loss_mask[:, 1:], attention_mask=mask, media=media)

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
    return _results(actor, batch, lambda: [outputs for part in parts for outputs in _run(actor, part, side="right")])


def together(actor: KitActor, batch: Batch, *, side: str) -> Results:
    """Run the padded batch, which the actor may pack."""
    return _results(actor, batch, lambda: _run(actor, batch, side=side))


def log_probs_of(actor: KitActor, batch: Batch, *, grad: bool = False) -> list[torch.Tensor]:
    """Return the log-probs of each sample's loss tokens, (L,) each."""
    with torch.set_grad_enabled(grad):
        return [log_probs.detach() for log_probs, _ in _run(actor, batch, side="right")]


def _run(actor: KitActor, batch: Batch, *, side: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log-probs and entropies of each sample's loss tokens."""
    given = batch.padded(side)
    # OpenRLHF's entropy is compiled, which takes a C++ compiler half a minute.
    with torch.compiler.set_stance("force_eager"):
        log_probs, output = actor(
            given.sequences,
            given.action_mask,
            attention_mask=given.attention_mask,
            media=given.media,
            return_output=True,
            return_entropy=True,
        )
    loss_mask = given.action_mask.bool()
    assert torch.count_nonzero(log_probs[~loss_mask]) == 0
    return [(log_probs[row][mask], output.entropy[row][mask]) for row, mask in enumerate(loss_mask)]


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
