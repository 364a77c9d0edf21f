"""The reference's log-probs of groups that are finished, computed while the engines generate the others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ray
import torch
from torch.nn.utils.rnn import pad_sequence

from lmm_r1.config.ppo import AHEAD_TOKENS
from lmm_r1.data.sample import media_before
from lmm_r1.host.openrlhf import Experience
from lmm_r1.host.openrlhf_workers import RayActorGroup
from lmm_r1.rl.batching import PassLimits, data_parallel_size, plan_forward, sample_sizes
from lmm_r1.rl.workers import model_inputs

Key: TypeAlias = tuple[bytes, tuple[Hashable, ...]]


@dataclass(frozen=True, kw_only=True)
class _Started:
    """Passes that the workers have been given."""

    samples: list[list[Experience]]
    refs: list[ray.ObjectRef]


class ReferenceAhead:
    """The reference's passes over one rollout."""

    def __init__(self, group: RayActorGroup, *, limits: PassLimits, pad_token_id: int, gpus_per_pass: int = 1) -> None:
        """Args:
        limits: of a pass that computes nothing else at the same time.
        gpus_per_pass: GPUs that share a pass.
        """
        tokens = AHEAD_TOKENS * gpus_per_pass
        self._limits = replace(limits, tokens=tokens if limits.tokens is None else min(tokens, limits.tokens))
        self._group = group
        self._ranks = data_parallel_size(group)
        self._pad_token_id = pad_token_id
        self._waiting: list[Experience] = []
        self._started: list[_Started] = []
        # Of the samples of the whole rollout, in its order.
        self._keys: list[Key] = []

    def add(self, samples: Sequence[Experience]) -> None:
        """Take the samples of a finished group; full passes are started at once, when there is one for every rank."""
        self._waiting += samples
        assert self._limits.tokens is not None, "made so"
        full = self._limits.cost(sample_sizes(self._waiting)) >= self._ranks * self._limits.tokens
        if full and len(self._waiting) % self._ranks == 0:
            self._start(self._waiting)
            self._waiting = []

    def finish(self, samples: Sequence[Experience]) -> None:
        """Start the passes over those of the whole rollout's samples that have none yet."""
        self._keys = [_key(sample) for sample in samples]
        known = {_key(sample) for started in self._started for batch in started.samples for sample in batch}
        missing = [sample for sample, key in zip(samples, self._keys, strict=True) if key not in known]
        if missing:
            # Every rank computes as many samples.
            self._start([*missing, *samples[: -len(missing) % self._ranks]])

    def wait(self) -> None:
        """Wait until all passes that were started are done."""
        refs = [ref for started in self._started for ref in started.refs]
        ray.wait(refs, num_returns=len(refs), fetch_local=False)

    def log_probs(self, passes: Sequence[Experience]) -> list[torch.Tensor]:
        """Return those of the samples of each pass, (B, A), in which they stand by their places in the rollout."""
        known: dict[Key, torch.Tensor] = {}
        for started in self._started:
            found = [output for part in ray.get(started.refs)[:: self._group.duplicate_actors] for output in part]
            for batch, rows in zip(started.samples, found, strict=True):
                known |= {_key(one): row[: one.sequences.numel() - 1] for one, row in zip(batch, rows, strict=True)}
        return [
            pad_sequence([known[self._keys[place]] for place in experience.index], batch_first=True)
            for experience in passes
        ]

    def _start(self, samples: Sequence[Experience]) -> None:
        plan = plan_forward(sample_sizes(samples), ranks=self._ranks, limits=self._limits)
        batches = [[samples[place] for place in batch] for rank in plan for batch in rank]
        passes = [
            Experience.concat_experiences([_asked(one) for one in batch], self._pad_token_id) for batch in batches
        ]
        inputs: dict[str, Any] = model_inputs(passes)
        refs = self._group.async_run_method_batch(
            method_name="forward", action_mask=[one.action_mask for one in passes], **inputs
        )
        self._started.append(_Started(samples=batches, refs=refs))


def _asked(sample: Experience) -> Experience:
    """Return what a model that gives log-probs is told of a sample."""
    return Experience(
        sequences=sample.sequences,
        attention_mask=sample.attention_mask,
        action_mask=sample.action_mask,
        mm_train_inputs=sample.mm_train_inputs,
    )


def _key(sample: Experience) -> Key:
    """Return what log-probs depend on: a sample's tokens (1, T) and its media."""
    return sample.sequences.numpy().tobytes(), media_before(sample.mm_train_inputs[0], sample.sequences.numel())
