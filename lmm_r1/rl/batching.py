"""How samples are divided into packed passes."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import MOST_PASS_TOKENS
from lmm_r1.data.prefix_tree import TreeSample, prefix_tree
from lmm_r1.data.sample import media_before
from lmm_r1.host.openrlhf import Experience
from lmm_r1.host.openrlhf_workers import RayActorGroup

Batch = list["SampleSize"]


class SharedTokens(NamedTuple):
    """A node of the tree of a group's samples."""

    node: int
    """Its number within the group."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    """What matters of a sample when batches are cut."""

    index: int
    """Its place among the samples, which plans are made of."""
    group: Hashable
    """Samples of one group have the prompt and its media in common."""
    prompt: int
    """Tokens of the prompt, those of its images included."""
    response: int
    shared: tuple[SharedTokens, ...] = ()
    """What its response begins with that other samples of the group have as well, in order."""

    @property
    def own(self) -> int:
        """Tokens that no other sample has."""
        return self.response - sum(part.tokens for part in self.shared)

    @property
    def path(self) -> tuple[Hashable, ...]:
        """What it shares with others, from what most do to what is its own."""
        return (self.group, *(part.node for part in self.shared), ("sample", self.index))


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """What one forward pass may hold."""

    samples: int | None
    """A pass with this many samples gets no further group (or sample, without shared prefixes); None for any number."""
    tokens: int | None
    """Tokens that are computed in a pass, which only a single sample may exceed; None for any number."""
    share_prefix: bool
    """Whether what samples of a group begin with is computed once per pass, which keeps groups in one pass."""

    def cost(self, batch: Batch) -> int:
        """Return the tokens that are computed for samples in one pass."""
        if not self.share_prefix:
            return sum(sample.prompt + sample.response for sample in batch)
        prompts = {sample.group: sample.prompt for sample in batch}
        nodes = {(sample.group, part.node): part.tokens for sample in batch for part in sample.shared}
        return sum(prompts.values()) + sum(nodes.values()) + sum(sample.own for sample in batch)

    def has_room(self, *, samples: int, tokens: int, more_tokens: int) -> bool:
        """Say whether a pass with so many samples and tokens may get something more."""
        return (self.samples is None or samples < self.samples) and (
            self.tokens is None or tokens + more_tokens <= self.tokens
        )


@dataclass
class _Load:
    """A batch that is being filled, and the tokens that are computed for it."""

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

    Every rank gets as many samples and as many passes as any other, and about as many tokens.
    """
    passes = [_split_passes(share, limits) for share in _split_ranks(samples, ranks=ranks, limits=limits)]
    count = max(map(len, passes))
    return [[[sample.index for sample in batch] for batch in _divide(share, count, limits)] for share in passes]


def plan_update(
    samples: Sequence[SampleSize], *, batch_size: int, ranks: int, limits: PassLimits, seed: str
) -> list[list[list[list[int]]]]:
    """Return the passes of each rank in each optimizer step, as indices of samples.

    Which samples make up a step depends on their groups, the batch size and the seed alone.
    """
    steps = _split_steps(samples, batch_size=batch_size, seed=seed)
    return [plan_forward(step, ranks=ranks, limits=limits) for step in steps]


def _split_steps(samples: Sequence[SampleSize], *, batch_size: int, seed: str) -> list[Batch]:
    """Return batches of exactly `batch_size` samples, groups in random order; what is left over is not used."""
    groups = _groups(samples)
    random.Random(seed).shuffle(groups)
    order = [sample for group in groups for sample in group]
    return [order[start : start + batch_size] for start in range(0, len(order) - batch_size + 1, batch_size)]


def _split_ranks(samples: Sequence[SampleSize], *, ranks: int, limits: PassLimits) -> list[Batch]:
    """Return as many samples for each rank; groups go whole, the largest first, to where the fewest tokens are."""
    assert len(samples) % ranks == 0, "refused by config.resolve"
    room = len(samples) // ranks
    shares = [_Load() for _ in range(ranks)]
    for group in sorted(_groups(samples), key=limits.cost, reverse=True):
        while group:
            fitting = [share for share in shares if share.samples + len(group) <= room]
            # A group for which no rank has room is divided into as few parts as there can be.
            share = min(fitting, key=attrgetter("tokens")) if fitting else min(shares, key=attrgetter("samples"))
            part, group = group[: room - share.samples], group[room - share.samples :]
            share.add(part, tokens=limits.cost(part))
    return [share.batch for share in shares]


def _split_passes(samples: Sequence[SampleSize], limits: PassLimits) -> list[Batch]:
    """Return passes within the limits: each part goes, the largest first, to the first pass that has room for it."""
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
    """Return what of a group stays together: all of it, or as much as the tokens allow, each part with all it begins with."""
    if not limits.share_prefix:
        return [[sample] for sample in group]
    if limits.tokens is None or limits.cost(group) <= limits.tokens:
        return [group]
    parts: list[Batch] = []
    for twig in sorted(_twigs(group, limits), key=limits.cost, reverse=True):
        fitting = [part for part in parts if limits.cost(part + twig) <= limits.tokens]
        if fitting:
            # Where it has the most in common with what is there.
            best = min(fitting, key=lambda part: limits.cost(part + twig) - limits.cost(part))
            best += twig
        else:
            parts.append(list(twig))
    return parts


def _twigs(batch: Batch, limits: PassLimits) -> list[Batch]:
    """Return the largest branches of a tree that fit into a pass, or single samples."""
    assert limits.tokens is not None, "without a limit all of it fits"
    if len(batch) == 1 or limits.cost(batch) <= limits.tokens:
        return [batch]
    return [twig for branch in _branches(batch) for twig in _twigs(branch, limits)]


def _divide(passes: Sequence[Batch], count: int, limits: PassLimits) -> list[Batch]:
    """Return `count` passes, the largest first: those with the most tokens are divided until there are as many."""
    passes = list(passes)
    while len(passes) < count:
        largest = max((batch for batch in passes if len(batch) > 1), key=limits.cost)
        passes.remove(largest)
        passes += _halves(largest, limits)
    return sorted(passes, key=limits.cost, reverse=True)


def _halves(batch: Batch, limits: PassLimits) -> tuple[Batch, Batch]:
    """Return a pass in two of about as many tokens, between its groups or else branches where they are shared."""
    parts = _branches(batch) if limits.share_prefix else [[sample] for sample in batch]
    one: Batch = []
    other: Batch = []
    for part in sorted(parts, key=limits.cost, reverse=True):
        lighter = min(one, other, key=limits.cost)
        lighter += part
    return one, other


def _groups(samples: Sequence[SampleSize]) -> list[Batch]:
    """Return the samples by group, in the order in which groups come first, and those of a branch side by side."""
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
    """Return samples by what they go on with where not all of them go on alike: by group, by node or each by itself."""
    for place in range(max(len(sample.path) for sample in batch)):
        branches: dict[Hashable, Batch] = {}
        for sample in batch:
            branches.setdefault(sample.path[place], []).append(sample)
        if len(branches) > 1:
            return list(branches.values())
    return [batch]


def prompt_tokens(sample: Experience) -> int:
    """Return how many tokens of a sample without padding stand before its first loss token; all where it has none."""
    first = sample.action_mask.flatten().nonzero().flatten()[:1]
    # The action mask is about the token after each.
    return int(first) + 1 if len(first) else sample.sequences.numel()


def data_parallel_size(group: RayActorGroup) -> int:
    """Return how many workers of a group get samples of their own."""
    return len(group._actor_handlers) // group.duplicate_actors


def pass_limits(config: PPOConfig, settings: Any, *, share_prefix: bool) -> PassLimits:
    """Return what one pass may hold by `--rollout.*` or `--train.*`; tokens count per group of GPUs that share a pass."""
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


def sample_sizes(samples: Sequence[Experience]) -> list[SampleSize]:
    """Return what matters of experiences of one sample each, without padding; groups have prompt and media in common."""
    groups: dict[Hashable, list[int]] = {}
    prompts = []
    for index, sample in enumerate(samples):
        token_ids, prompt = sample.sequences.flatten(), prompt_tokens(sample)
        key = (token_ids[:prompt].numpy().tobytes(), media_before(sample.mm_train_inputs[0], prompt))
        groups.setdefault(key, []).append(index)
        prompts.append(prompt)
    sizes = [
        SampleSize(
            index=index,
            group=number,
            prompt=prompts[index],
            response=samples[index].sequences.numel() - prompts[index],
            shared=shared,
        )
        for number, members in enumerate(groups.values())
        for index, shared in zip(
            members, _shared([samples[index] for index in members], prompt=prompts[members[0]]), strict=True
        )
    ]
    return sorted(sizes, key=attrgetter("index"))


def _shared(group: Sequence[Experience], *, prompt: int) -> list[tuple[SharedTokens, ...]]:
    """Return of each sample of a group the nodes behind the prompt that it has in common with others."""
    rows = [
        TreeSample(
            token_ids=sample.sequences.flatten().numpy(),
            media=media if isinstance(media := sample.mm_train_inputs[0], tuple) else (),
        )
        for sample in group
    ]
    shared: list[list[SharedTokens]] = [[] for _ in group]
    for number, node in enumerate(prefix_tree(rows, known=prompt)):
        tokens = node.end - max(node.start, prompt)
        if tokens and len(node.samples) > 1:
            for member in node.samples:
                shared[member].append(SharedTokens(node=number, tokens=tokens))
    return [tuple(parts) for parts in shared]
