"""Work that runs ahead: rollouts during updates, and the reference's passes during generation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TypeAlias

import ray
import torch

from lmm_r1.config.ppo import AHEAD_TOKENS
from lmm_r1.data.sample import Sample, media_before
from lmm_r1.host.workers import WorkerGroup
from lmm_r1.rl.batching import PassLimits, forward_passes, sample_sizes
from lmm_r1.rl.outputs import collected
from lmm_r1.rl.rollouts import MadeRollout, Make
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.rl.workers import ModelWorker


class RolloutsAhead:
    """Makes rollouts in a thread of its own, up to `ahead` that are not taken yet.

    The next one begins when one is taken, after the update on the previous one. When a sample is trained on, the weights
    that generated it are therefore at most `ahead` updates old.
    """

    def __init__(self, make: Make, *, ahead: int, across_updates: bool) -> None:
        """Make a source.

        Args:
            across_updates: whether weights are replaced during a rollout; if not, `replacing` waits for its end.
        """
        self._make = make
        self._across_updates = across_updates
        self._changed = threading.Condition()
        self._room = ahead
        self._ready: deque[MadeRollout | None | BaseException] = deque()
        self._making = self._replacing = self._closed = False
        self._waited_s = self._idle_s = 0.0

    def start(self, step: int) -> None:
        """Begin, with the rollout of this step."""
        threading.Thread(target=self._run, args=(step,), name="rollouts", daemon=True).start()

    def take(self, step: int) -> MadeRollout | None:
        """Return the next rollout as soon as it is there, None after the last one; raises what its generation raised."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            made = self._ready.popleft()
            self._room += 1
            self._changed.notify_all()
        self._waited_s += time.perf_counter() - began
        if isinstance(made, BaseException):
            raise made
        return made

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Wait for the current rollout to end, unless rollouts continue across updates; begin none in the block."""
        began = time.perf_counter()
        with self._changed:
            # Set this first: the next rollout would begin at once.
            self._replacing = True
            self._changed.wait_for(lambda: self._across_updates or not self._making)
        self._waited_s += time.perf_counter() - began
        try:
            yield
        finally:
            with self._changed:
                self._replacing = False
                self._changed.notify_all()

    def take_waited(self) -> float:
        """Return how many seconds the trainer has waited for rollouts since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """Begin no more rollouts; the current one ends with the process, or with its engines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self, step: int) -> None:
        try:
            while self._is_next_due():
                made = self._make(step)
                self._hand_over(made and replace(made, waited_s=self._idle_s))
                if made is None or not made.is_whole:
                    return
                step += 1
        except BaseException as error:  # `take` raises it
            self._hand_over(error)

    def _is_next_due(self) -> bool:
        """Wait until the next rollout may begin; say whether one is still wanted."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._room and not self._replacing))
            if self._closed:
                return False
            self._room -= 1
            self._making = True
        self._idle_s = time.perf_counter() - began
        return True

    def _hand_over(self, made: MadeRollout | None | BaseException) -> None:
        with self._changed:
            self._making = False
            self._ready.append(made)
            self._changed.notify_all()


def ages(samples: Sequence[Sample], *, updates: int) -> dict[str, float]:
    """Return the metrics of how old the weights were that generated a step's samples.

    Args:
        updates: how many updates the policy had before the step.
    """
    staleness = [updates - sample.weight_version for sample in samples]
    return {
        "async/staleness_mean": fmean(staleness),
        "async/staleness_max": max(staleness),
        "async/stale_samples": fmean(age > 0 for age in staleness),
        "async/partial_samples": fmean(len(sample.weights) > 1 for sample in samples),
    }


Key: TypeAlias = tuple[bytes, tuple[Hashable, ...]]


class ReferenceAhead:
    """The reference's passes over one rollout, which run while the engines generate its other groups."""

    def __init__(self, group: WorkerGroup, *, limits: PassLimits, gpus_per_pass: int = 1) -> None:
        """Args:
        limits: of a pass that computes nothing else at the same time.
        gpus_per_pass: GPUs that share a pass.
        """
        tokens = AHEAD_TOKENS * gpus_per_pass
        self._limits = replace(limits, tokens=tokens if limits.tokens is None else min(tokens, limits.tokens))
        self._group = group
        self._waiting: list[TrainingSample] = []
        # The samples that the workers have been given, in the order of the answers.
        self._started: list[tuple[list[TrainingSample], list[ray.ObjectRef]]] = []
        # Keys of the whole rollout's samples, in order.
        self._keys: list[Key] = []

    def add(self, samples: Sequence[TrainingSample]) -> None:
        """Take the samples of a finished group; full passes are started at once, when there is one for every rank."""
        number = self._waiting[-1].group + 1 if self._waiting else 0
        self._waiting += [replace(sample, group=number) for sample in samples]
        assert self._limits.tokens is not None, "made so"
        full = self._limits.cost(sample_sizes(self._waiting)) >= self._group.ranks * self._limits.tokens
        if full and len(self._waiting) % self._group.ranks == 0:
            self._start(self._waiting)
            self._waiting = []

    def finish(self, samples: Sequence[TrainingSample]) -> None:
        """Start the passes over the samples of the whole rollout that have none yet."""
        self._keys = [_key(sample) for sample in samples]
        known = {_key(sample) for given, _ in self._started for sample in given}
        missing = [sample for sample, key in zip(samples, self._keys, strict=True) if key not in known]
        if missing:
            # Every rank computes as many samples.
            self._start([*missing, *samples[: -len(missing) % self._group.ranks]])

    def wait(self) -> None:
        """Wait until all passes that were started are done."""
        refs = [ref for _, started in self._started for ref in started]
        ray.wait(refs, num_returns=len(refs), fetch_local=False)

    def log_probs(self) -> list[torch.Tensor]:
        """Return the log-probs of the samples that `finish` was given, (A,) each."""
        known: dict[Key, torch.Tensor] = {}
        for samples, refs in self._started:
            known |= dict(zip(map(_key, samples), collected(self._group, refs), strict=True))
        return [known[key] for key in self._keys]

    def _start(self, samples: Sequence[TrainingSample]) -> None:
        passes = forward_passes(samples, ranks=self._group.ranks, limits=self._limits)
        refs = self._group.start_shares(ModelWorker.forward, self._group.hand_out(passes))
        self._started.append(([sample for rank in passes for one in rank for sample in one], refs))


def _key(sample: TrainingSample) -> Key:
    """Return what log-probs depend on: the tokens and the media of a sample."""
    return sample.token_ids.numpy().tobytes(), media_before(sample.media, len(sample.token_ids))
