"""Rollouts that are made during updates."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean

from lmm_r1.data.sample import Sample
from lmm_r1.rl.rollouts import MadeRollout, Make


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
