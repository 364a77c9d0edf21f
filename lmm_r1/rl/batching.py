"""How samples are divided into packed passes: those of the rollout's models, then those of the update."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import MOST_PASS_TOKENS
from lmm_r1.data.sample import TreeSample, prefix_tree
from lmm_r1.rl.samples import TrainingSample

Batch = list["SampleSize"]


class SharedTokens(NamedTuple):
    """A node of the tree of a group's samples."""

    node: int
    """Its number within the group."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    """The sizes of a sample that decide into which pass it goes."""

    index: int
    """Its place among the samples; plans are lists of places."""
    group: Hashable
    """Samples of one group share the prompt and its media."""
    prompt: int
    """Tokens of the prompt, including those of its images."""
    response: int
    shared: tuple[SharedTokens, ...] = ()
    """The parts at the beginning of its response that other samples of the group share, in order."""

    @property
    def own(self) -> int:
        """Tokens that it shares with no other sample."""
        return self.response - sum(part.tokens for part in self.shared)

    @property
    def path(self) -> tuple[Hashable, ...]:
        """The nodes that lead to it: its group first, then the nodes that it shares with ever fewer samples, then its own."""
        return (self.group, *(part.node for part in self.shared), ("sample", self.index))


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """What one forward pass may hold."""

    samples: int | None
    """A pass with this many samples gets no further group (or sample, without shared prefixes); None for no limit."""
    tokens: int | None
    """Tokens computed in a pass, which only a single sample may exceed; None for no limit."""
    share_prefix: bool
    """Whether shared prefixes are computed once per pass, in which case groups stay in one pass."""

    def cost(self, batch: Batch) -> int:
        """Return the number of tokens computed for samples in one pass."""
        if not self.share_prefix:
            return sum(sample.prompt + sample.response for sample in batch)
        prompts = {sample.group: sample.prompt for sample in batch}
        nodes = {(sample.group, part.node): part.tokens for sample in batch for part in sample.shared}
        return sum(prompts.values()) + sum(nodes.values()) + sum(sample.own for sample in batch)

    def has_room(self, *, samples: int, tokens: int, more_tokens: int) -> bool:
        """Say whether a pass with so many samples and tokens may get more tokens."""
        return (self.samples is None or samples < self.samples) and (
            self.tokens is None or tokens + more_tokens <= self.tokens
        )


@dataclass
class _Load:
    """A batch that is being filled, and the number of tokens computed for it."""

    batch: Batch = field(default_factory=list)
    tokens: int = 0

    @property
    def samples(self) -> int:
        return len(self.batch)

    def add(self, part: Batch, *, tokens: int) -> None:
        self.batch += part
        self.tokens += tokens


def plan_forward(samples: Sequence[SampleSize], *, ranks: int, limits: PassLimits) -> list[list[list[int]]]:
    """Return the passes of each rank over all samples, as indices of samples.

    Every rank gets the same number of samples and of passes, and about the same number of tokens.
    """
    passes = [_split_passes(share, limits) for share in _split_ranks(samples, ranks=ranks, limits=limits)]
    count = max(map(len, passes))
    return [[[sample.index for sample in batch] for batch in _divide(share, count, limits)] for share in passes]


def plan_update(
    samples: Sequence[SampleSize], *, batch_size: int, ranks: int, limits: PassLimits, seed: str
) -> list[list[list[list[int]]]]:
    """Return the passes of each rank in each optimizer step, as indices of samples.

    Which samples make up a step depends only on their groups, the batch size and the seed.
    """
    steps = _split_steps(samples, batch_size=batch_size, seed=seed)
    return [plan_forward(step, ranks=ranks, limits=limits) for step in steps]


def _split_steps(samples: Sequence[SampleSize], *, batch_size: int, seed: str) -> list[Batch]:
    """Return batches of `batch_size` samples, groups in random order; the last batch may be smaller."""
    groups = _groups(samples)
    random.Random(seed).shuffle(groups)
    order = [sample for group in groups for sample in group]
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _split_ranks(samples: Sequence[SampleSize], *, ranks: int, limits: PassLimits) -> list[Batch]:
    """Return the same number of samples for each rank: whole groups, the largest first, go to the rank with the fewest tokens."""
    assert len(samples) % ranks == 0, "refused by config.resolve"
    room = len(samples) // ranks
    shares = [_Load() for _ in range(ranks)]
    for group in sorted(_groups(samples), key=limits.cost, reverse=True):
        while group:
            fitting = [share for share in shares if share.samples + len(group) <= room]
            # If no rank has room for a group, divide it into as few parts as possible.
            share = min(fitting, key=attrgetter("tokens")) if fitting else min(shares, key=attrgetter("samples"))
            part, group = group[: room - share.samples], group[room - share.samples :]
            share.add(part, tokens=limits.cost(part))
    return [share.batch for share in shares]


def _split_passes(samples: Sequence[SampleSize], limits: PassLimits) -> list[Batch]:
    """Return passes within the limits: each part, the largest first, goes to the first pass that has room for it."""
    parts = [part for group in _groups(samples) for part in _parts(group, limits)]
    passes: list[_Load] = []
    for part in sorted(parts, key=limits.cost, reverse=True):
        _add_to_first(passes, part, tokens=limits.cost(part), limits=limits)
    return [load.batch for load in passes]


def _add_to_first(passes: list[_Load], part: Batch, *, tokens: int, limits: PassLimits) -> None:
    """Add to the first pass that has room, or to a new one."""
    for load in passes:
        if limits.has_room(samples=load.samples, tokens=load.tokens, more_tokens=tokens):
            break
    else:
        load = _Load()
        passes.append(load)
    load.add(part, tokens=tokens)


def _parts(group: Batch, limits: PassLimits) -> list[Batch]:
    """Return the parts of a group that stay together: the whole group, or branches as large as the tokens allow."""
    if not limits.share_prefix:
        return [[sample] for sample in group]
    if limits.tokens is None or limits.cost(group) <= limits.tokens:
        return [group]
    parts: list[Batch] = []
    for twig in sorted(_twigs(group, limits), key=limits.cost, reverse=True):
        fitting = [part for part in parts if limits.cost(part + twig) <= limits.tokens]
        if fitting:
            # Add it to the part with which it shares the most tokens.
            best = min(fitting, key=lambda part: limits.cost(part + twig) - limits.cost(part))
            best += twig
        else:
            parts.append(list(twig))
    return parts


def _twigs(batch: Batch, limits: PassLimits) -> list[Batch]:
    """Return the largest branches of the tree that fit into a pass, or single samples."""
    assert limits.tokens is not None, "without a limit everything fits"
    if len(batch) == 1 or limits.cost(batch) <= limits.tokens:
        return [batch]
    return [twig for branch in _branches(batch) for twig in _twigs(branch, limits)]


def _divide(passes: Sequence[Batch], count: int, limits: PassLimits) -> list[Batch]:
    """Return `count` passes, the largest first, by dividing the passes with the most tokens."""
    passes = list(passes)
    while len(passes) < count:
        largest = max((batch for batch in passes if len(batch) > 1), key=limits.cost)
        passes.remove(largest)
        passes += _halves(largest, limits)
    return sorted(passes, key=limits.cost, reverse=True)


def _halves(batch: Batch, limits: PassLimits) -> tuple[Batch, Batch]:
    """Return two halves of a pass with about the same number of tokens, divided between groups or branches."""
    parts = _branches(batch) if limits.share_prefix else [[sample] for sample in batch]
    one: Batch = []
    other: Batch = []
    for part in sorted(parts, key=limits.cost, reverse=True):
        lighter = min(one, other, key=limits.cost)
        lighter += part
    return one, other


def _groups(samples: Sequence[SampleSize]) -> list[Batch]:
    """Return the samples by group, in the order of their first samples, with those of a branch next to one another."""
    groups: dict[Hashable, Batch] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return [_in_tree_order(group) for group in groups.values()]


def _in_tree_order(batch: Batch) -> Batch:
    branches = _branches(batch)
    if len(branches) == len(batch):
        return batch
    return [sample for branch in branches for sample in _in_tree_order(branch)]


def _branches(batch: Batch) -> list[Batch]:
    """Return the samples by the first node of their paths that they do not all share: by group, by branch or singly."""
    for place in range(max(len(sample.path) for sample in batch)):
        branches: dict[Hashable, Batch] = {}
        for sample in batch:
            branches.setdefault(sample.path[place], []).append(sample)
        if len(branches) > 1:
            return list(branches.values())
    return [batch]


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


def sample_sizes(samples: Sequence[TrainingSample]) -> list[SampleSize]:
    """Return the sizes of samples, with the parts that those of a group share."""
    groups: dict[int, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    shared = {number: iter(_shared(members)) for number, members in groups.items()}
    return [
        SampleSize(
            index=index,
            group=sample.group,
            prompt=sample.prompt_tokens,
            response=len(sample.token_ids) - sample.prompt_tokens,
            shared=next(shared[sample.group]),
        )
        for index, sample in enumerate(samples)
    ]


def _shared(group: Sequence[TrainingSample]) -> list[tuple[SharedTokens, ...]]:
    """Return for each sample of a group the nodes after the prompt that it shares with others."""
    prompt = group[0].prompt_tokens
    rows = [TreeSample(token_ids=sample.token_ids.numpy(), media=sample.media or ()) for sample in group]
    shared: list[list[SharedTokens]] = [[] for _ in group]
    for number, node in enumerate(prefix_tree(rows, known=prompt)):
        tokens = node.end - max(node.start, prompt)
        if tokens and len(node.samples) > 1:
            for member in node.samples:
                shared[member].append(SharedTokens(node=number, tokens=tokens))
    return [tuple(parts) for parts in shared]


Pass: TypeAlias = list[TrainingSample]
"""The samples of one forward pass."""


@dataclass(frozen=True, kw_only=True)
class UpdatePasses:
    """The passes of the optimizer steps on one rollout."""

    steps: list[list[list[Pass]]]
    """For each optimizer step the passes of each rank; every rank has as many."""
    unique_tokens: int
    """How many tokens the steps would compute if each computed shared prefixes once."""


# The fewest tokens that samples can take: what the samples of a group begin with is computed once.
WITHOUT_REPEATS = PassLimits(samples=None, tokens=None, share_prefix=True)


def forward_passes(samples: Sequence[TrainingSample], *, ranks: int, limits: PassLimits) -> list[list[Pass]]:
    """Return the passes of each rank over a rollout; every rank has as many."""
    plan = plan_forward(sample_sizes(samples), ranks=ranks, limits=limits)
    return [[[samples[place] for place in batch] for batch in rank] for rank in plan]


def update_passes(
    samples: Sequence[TrainingSample], *, batch_size: int, ranks: int, limits: PassLimits, seed: str
) -> UpdatePasses:
    """Return the passes of every optimizer step on a rollout's samples.

    Which samples make up an optimizer step depends only on the seed and the batch size, not on the number of ranks or
    on how the samples were computed.
    """
    items = [sample.trained_part() for sample in samples]
    sizes = sample_sizes(items)
    plan = plan_update(sizes, batch_size=batch_size, ranks=ranks, limits=limits, seed=seed)
    steps = [[[[items[place] for place in batch] for batch in rank] for rank in step] for step in plan]
    updated = [[sizes[place] for rank in step for batch in rank for place in batch] for step in plan]
    return UpdatePasses(steps=steps, unique_tokens=sum(map(WITHOUT_REPEATS.cost, updated)))
