"""Samples as they are trained on, and how they are divided into packed passes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import MOST_PASS_TOKENS
from lmm_r1.data.sample import Sample, SentMedia, TreeSample, prefix_tree
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.rl.mismatch import ROWS_WITH, Modality, modality_of


@dataclass(kw_only=True, eq=False)
class TrainingSample(ModelSample):
    """A sample that is trained on; a tensor of A = L - 1 entries is about the token after each but the last."""

    place: int
    """Its place in the rollout."""
    group: int
    """The number of its prompt in the rollout: samples of a group share prompt and media."""
    location: str
    """Where its row comes from, for errors."""
    prompt_tokens: int
    """How many of its first tokens are the prompt's, those of its images included."""
    turns: torch.Tensor
    """(A,), the number of the policy's turn from 0; -1 for tokens that the policy did not generate."""
    engine_log_probs: torch.Tensor | None
    """(A,), those that the engine sampled by."""
    media: SentMedia  # type: ignore[assignment]  # workers fetch it
    columns: Mapping[str, Any]
    """Of the row's record."""
    modality: Modality
    reward: float | None
    """None until a reward model has given it."""
    response_tokens: int
    """How many tokens the policy generated."""
    truncated: bool
    masked: bool
    """Whether it is left out of the loss and of the comparison within its group."""
    logged: dict[str, float] = field(default_factory=dict)
    """Values of which the means over the rollout are logged."""
    log_probs: torch.Tensor | None = None
    """(A,), the policy's before the update; None if the update's own pass gives them."""
    reference_log_probs: torch.Tensor | None = None  # (A,)
    values: torch.Tensor | None = None  # (A,)
    kl: torch.Tensor | None = None
    """(A,), what reduces the rewards of tokens."""
    advantages: torch.Tensor | None = None  # (A,)
    returns: torch.Tensor | None = None  # (A,)

    @classmethod
    def of(
        cls, sample: Sample, *, max_len: int, place: int = 0, group: int = 0, logs_masked: bool = False
    ) -> TrainingSample:
        """Return a sample of an engine.

        Args:
            logs_masked: whether single responses may be masked, in addition to episodes.
        """
        token_ids, log_probs = sample.token_ids, sample.log_probs
        location = sample.row.location
        assert len(token_ids) <= max_len, f"{location}: no engine gives {len(token_ids)} of {max_len} tokens"
        reward, modality = sample.reward, modality_of(sample.row)
        logged = {} if reward is None else {"reward": reward.reward, "score": reward.score, **reward.parts}
        logged |= {name: float(kind == modality) for kind, name in ROWS_WITH.items()}
        logged |= {"response_length": float(sample.generated_tokens), "total_length": float(len(token_ids))}
        if logs_masked or sample.played is not None:
            logged["masked"] = float(sample.masked)
        turns = torch.full((len(token_ids),), -1)
        for number, (start, end) in enumerate(sample.action_ranges):
            turns[start:end] = number
        return cls(
            place=place,
            group=group,
            location=location,
            token_ids=torch.tensor(token_ids),
            prompt_tokens=len(sample.segments[0].token_ids),
            loss_mask=torch.tensor(sample.loss_mask[1:], dtype=torch.bool),
            turns=turns[1:],
            engine_log_probs=None if log_probs is None else torch.tensor(log_probs[1:]),
            media=sample.media or None,
            columns=sample.row.columns,
            modality=modality,
            reward=None if reward is None else reward.reward,
            response_tokens=sample.generated_tokens,
            truncated=sample.truncated,
            masked=sample.masked,
            logged=logged,
        )

    def trained_part(self) -> TrainingSample:
        """Return what an update takes of it: only the prompt of a masked sample.

        No loss then counts it or divides by it, neither its tokens nor the sample: sum_i M_i A_i L_i / sum_i M_i (Mini-o3,
        arXiv:2509.07969). Entropy and KL leave it out as well. Its group computes its prompt anyway.
        """
        prompt = self.prompt_tokens
        if not self.masked or prompt == len(self.token_ids):
            return self
        cut: dict[str, Any] = {
            name: value[: prompt if name == "token_ids" else prompt - 1]
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        kept = tuple(item for item in self.media or () if item.start < prompt)
        return replace(self, **cut, media=kept or None)


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
