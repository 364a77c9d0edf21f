"""Samples that are branches of one another: trees of turns, drawn at random."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from helpers.packed_batches import Batch, Sample, shuffled, turns

from lmm_r1.lmm_kits import EncodedPrompt

Part = tuple[int, ...] | EncodedPrompt
# No special tokens of any tiny vocabulary.
TOKENS = (20, 59)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Draws the parts of samples: what is generated, and what is observed behind it."""

    draw: random.Random
    observations: Sequence[EncodedPrompt]

    def parts(self, known: Sequence[tuple[Part, ...]]) -> tuple[Part, ...]:
        """Return the parts of a sample, of which one of those that are known may hold the first ones as well."""
        begun = list(self.draw.choice(known)) if known else []
        parts = begun[: self.draw.randint(0, len(begun))]
        if parts and isinstance(parts[-1], tuple) and len(parts[-1]) > 1 and self.draw.random() < 0.5:
            # They part within a turn.
            kept = self.draw.randint(1, len(parts[-1]) - 1)
            parts[-1] = (*parts[-1][:kept], *self._generated())
        for _ in range(self.draw.randint(0 if parts else 1, 3)):
            parts.append(self._observed(parts))
        return tuple(parts)

    def _observed(self, parts: Sequence[Part]) -> Part:
        return self.draw.choice(self.observations) if parts and isinstance(parts[-1], tuple) else self._generated()

    def _generated(self) -> tuple[int, ...]:
        return tuple(self.draw.randint(*TOKENS) for _ in range(self.draw.randint(1, 4)))


def random_branches(
    prompts: Sequence[EncodedPrompt], observations: Sequence[EncodedPrompt], *, samples: int, seed: int
) -> Batch:
    """Return as many samples to each prompt, in an order in which those of one tree do not stand together.

    Among them are always one that another goes on from, one that is there twice, and one that is masked.
    """
    growth = Growth(draw=random.Random(seed), observations=observations)
    made: list[Sample] = []
    for prompt in prompts:
        known: list[tuple[Part, ...]] = []
        while len(known) < samples:
            known.append(growth.parts(known))
        made += [turns(prompt, *parts) for parts in known]
    last = made[-1]
    # What is shown is never cut.
    less = int(len(last.response) > 1 and last.loss_mask[-1])
    kept = len(last.response) - less
    begun = replace(last, response=last.response[:kept], loss_mask=last.loss_mask[:kept])
    masked = replace(made[0], loss_mask=(*made[0].loss_mask[:1], *(False,) * (len(made[0].response) - 1)))
    return shuffled([*made, made[0], masked, begun])


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
