"""How samples are divided into packed passes: those of the rollout's models, then those of the update."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import MOST_PASS_TOKENS
from lmm_r1.data.sample import TreeSample, prefix_tree
from lmm_r1.rl.samples import TrainingSample

Pass: TypeAlias = list[TrainingSample]
"""The samples of one forward pass."""


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """What one forward pass may hold."""

    samples: int | None
    """A pass with this many samples gets no further group (or sample, without shared prefixes); None for no limit."""
    tokens: int | None
    """Tokens computed in a pass, which only a single sample may exceed; None for no limit."""
    share_prefix: bool
    """Whether shared prefixes are computed once per pass, in which case groups stay in one pass."""

    def part(self, samples: Pass) -> _Part:
        """Return samples of one group, which stay together, with the number of tokens computed for them."""
        tokens = tree_tokens(samples) if self.share_prefix else sum(len(sample.token_ids) for sample in samples)
        return _Part(samples=samples, tokens=tokens)

    def pieces(self, group: _Part) -> list[_Part]:
        """Return the parts of a group that stay together: all of it, or as many samples as the tokens allow."""
        if not self.share_prefix:
            return [self.part([sample]) for sample in group.samples]
        if self.tokens is None or group.tokens <= self.tokens:
            return [group]
        found: list[_Part] = []
        prompt = group.samples[0].prompt_tokens
        # In this order, samples that share the most are next to one another.
        order = sorted(group.samples, key=lambda sample: sample.token_ids.tolist())
        if group.tokens == prompt + sum(len(sample.token_ids) - prompt for sample in order):
            # They share only the prompt.
            order = sorted(group.samples, key=lambda sample: len(sample.token_ids), reverse=True)
        for sample in order:
            own = len(sample.token_ids) - prompt
            places = [place for place, part in enumerate(found) if part.tokens + own <= self.tokens]
            grown = self.part([*found[-1].samples, sample]) if found else None
            if grown is not None and grown.tokens <= self.tokens:
                found[-1] = grown
            elif places:
                found[places[0]] = self.part([*found[places[0]].samples, sample])
            else:
                found.append(self.part([sample]))
        return found

    def has_room(self, load: _Load, *, tokens: int) -> bool:
        """Say whether a pass may get so many more tokens."""
        return (self.samples is None or load.count < self.samples) and (
            self.tokens is None or load.tokens + tokens <= self.tokens
        )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Samples of one group that stay in one pass."""

    samples: Pass
    tokens: int


@dataclass(kw_only=True)
class _Load:
    """The parts in a pass or on a rank."""

    parts: list[_Part] = field(default_factory=list)
    count: int = 0
    """Of samples."""
    tokens: int = 0

    @property
    def samples(self) -> Pass:
        return [sample for part in self.parts for sample in part.samples]

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        self.count += len(part.samples)
        self.tokens += part.tokens


def tree_tokens(group: Sequence[TrainingSample]) -> int:
    """Return the number of tokens of samples of one group if what they share is computed once."""
    rows = [TreeSample(token_ids=sample.token_ids.numpy(), media=sample.media or ()) for sample in group]
    return sum(node.length for node in prefix_tree(rows, known=group[0].prompt_tokens))


def forward_passes(samples: Sequence[TrainingSample], *, ranks: int, limits: PassLimits) -> list[list[Pass]]:
    """Return the passes of each rank over samples.

    Every rank gets the same number of samples and of passes, and about the same number of tokens.
    """
    shares = [_split_passes(share, limits) for share in _split_ranks(samples, ranks=ranks, limits=limits)]
    count = max(map(len, shares))
    return [[load.samples for load in _divided(passes, count, limits)] for passes in shares]


def _groups(samples: Sequence[TrainingSample]) -> list[Pass]:
    """Return the samples by group, in the order of their first samples."""
    groups: dict[int, Pass] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def _split_ranks(samples: Sequence[TrainingSample], *, ranks: int, limits: PassLimits) -> list[_Load]:
    """Return the same number of samples for each rank: whole groups, the largest first, go to the rank with the fewest tokens."""
    assert len(samples) % ranks == 0, "refused by config.resolve"
    room = len(samples) // ranks
    shares = [_Load() for _ in range(ranks)]
    for group in sorted(map(limits.part, _groups(samples)), key=lambda part: part.tokens, reverse=True):
        fitting = [share for share in shares if share.count + len(group.samples) <= room]
        if fitting:
            min(fitting, key=lambda share: share.tokens).add(group)
            continue
        # No rank has room for the group: divide it into as few parts as possible.
        left = group.samples
        while left:
            share = min(shares, key=lambda share: share.count)
            part, left = left[: room - share.count], left[room - share.count :]
            share.add(limits.part(part))
    return shares


def _split_passes(share: _Load, limits: PassLimits) -> list[_Load]:
    """Return passes within the limits: each piece, the largest first, goes to the first pass that has room for it."""
    pieces = [piece for part in share.parts for piece in limits.pieces(part)]
    passes: list[_Load] = []
    for piece in sorted(pieces, key=lambda piece: piece.tokens, reverse=True):
        fitting = next((load for load in passes if limits.has_room(load, tokens=piece.tokens)), None)
        if fitting is None:
            passes.append(fitting := _Load())
        fitting.add(piece)
    return passes


def _divided(passes: Sequence[_Load], count: int, limits: PassLimits) -> list[_Load]:
    """Return `count` passes, the largest first, by halving the passes with the most tokens."""
    passes = list(passes)
    while len(passes) < count:
        largest = max((load for load in passes if load.count > 1), key=lambda load: load.tokens)
        passes.remove(largest)
        parts = largest.parts
        if len(parts) == 1:
            parts = [limits.part([sample]) for sample in largest.samples]
        halves = _Load(), _Load()
        for part in sorted(parts, key=lambda part: part.tokens, reverse=True):
            min(halves, key=lambda half: half.tokens).add(part)
        passes += halves
    return sorted(passes, key=lambda load: load.tokens, reverse=True)


@dataclass(frozen=True, kw_only=True)
class UpdatePasses:
    """The passes of the optimizer steps on one rollout."""

    steps: list[list[list[Pass]]]
    """For each optimizer step the passes of each rank; every rank has as many."""
    unique_tokens: int
    """How many tokens the steps would compute if each computed shared prefixes once."""


def update_passes(
    samples: Sequence[TrainingSample], *, batch_size: int, ranks: int, limits: PassLimits, seed: str
) -> UpdatePasses:
    """Return the passes of every optimizer step on a rollout's samples; the last step may have fewer samples.

    Which samples make up an optimizer step depends only on the seed and the batch size, not on the number of ranks or
    on how the samples were computed.
    """
    groups = _groups([sample.trained_part() for sample in samples])
    random.Random(seed).shuffle(groups)
    order = [sample for group in groups for sample in group]
    steps = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return UpdatePasses(
        steps=[forward_passes(step, ranks=ranks, limits=limits) for step in steps],
        unique_tokens=sum(tree_tokens(group) for step in steps for group in _groups(step)),
    )


def pass_limits(config: PPOConfig, settings: Any, *, share_prefix: bool) -> PassLimits:
    """Return what one pass may hold by `--rollout.*` or `--train.*`; GPUs that share a pass add up their tokens."""
    by_tokens = config.train.dynamic_batch_enable
    most = config.train.max_tokens_per_gpu
    given = MOST_PASS_TOKENS if most is None else most
    tokens = given if settings.max_tokens_per_gpu is None else settings.max_tokens_per_gpu
    gpus = config.ds.tensor_parallel_size * config.ds.ulysses_size
    return PassLimits(
        samples=None if by_tokens else settings.micro_batch_size,
        tokens=tokens * gpus if by_tokens or share_prefix else None,
        share_prefix=share_prefix,
    )
