"""Where a run's rollouts come from: each made when its step is due, or ahead of it while the policy is updated."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

from lmm_r1.data.sample import Sample
from lmm_r1.rl.rollouts import Rollout


@dataclass(frozen=True, kw_only=True)
class MadeRollout:
    """The rollout of a step."""

    rollout: Rollout
    is_whole: bool
    """Whether it has all groups of a step; prompts end with one that has not."""
    position: Mapping[str, Any]
    """Of the prompts behind it, from which a run goes on that has learnt from it."""
    began: float
    ended: float
    """Of its generation, by `time.perf_counter`."""
    solved: float | None = None
    """How often prompts were solved behind it, as a curriculum has measured; None without one."""
    waited_s: float = 0.0
    """How long the engines had nothing to do before it, as it would have been too far ahead of the update."""


Make = Callable[[int], MadeRollout | None]
"""Makes the rollout of a step, counted from 1; None where there are too few prompts left."""


class RolloutSource(Protocol):
    """Gives the rollouts of a run's steps in their order."""

    def start(self, step: int) -> None:
        """Begin, with the rollout of this step."""

    def take(self, step: int) -> MadeRollout | None:
        """Return the rollout of the next step, None behind the last one; raises what its making has raised."""

    def replacing(self) -> AbstractContextManager[None]:
        """Wait until the engines' weights may be replaced, which they are in the block."""

    def close(self) -> None:
        """Make no more."""


class RolloutsInTurn:
    """Makes each rollout when it is taken."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def start(self, step: int) -> None:
        """Nothing is begun ahead."""

    def take(self, step: int) -> MadeRollout | None:
        return self._make(step)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Nothing is left."""


class RolloutsAhead:
    """Makes rollouts in a thread of its own, up to `ahead` that are not taken yet.

    The next one is begun when one is taken, which is after the update on the one before: so no weights that generate are
    older than `ahead` updates when their samples are learnt from.
    """

    def __init__(self, make: Make, *, ahead: int, across_updates: bool) -> None:
        """Make a source.

        Args:
            across_updates: weights are replaced while a rollout is made; else `replacing` waits for its end.
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
        """Return the next rollout as soon as it is there, None behind the last one; raises what its making has raised."""
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
        """Wait, where no rollout goes on across an update, until the one that is made has ended; begin none in the block."""
        began = time.perf_counter()
        with self._changed:
            # First: the next one would be begun at once.
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
        """Return for how many seconds the trainer has waited for rollouts since this was called last."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """Begin no more; what is being made ends with the process, or with its engines."""
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
        except BaseException as error:  # who takes it raises it
            self._hand_over(error)

    def _is_next_due(self) -> bool:
        """Wait until the next rollout may be begun; say whether one is wanted still."""
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
    """Return how old the weights were that a step's samples came of, as it is logged.

    Args:
        updates: how many the policy has had before the step.
    """
    staleness = [updates - sample.weight_version for sample in samples]
    return {
        "async/staleness_mean": fmean(staleness),
        "async/staleness_max": max(staleness),
        "async/stale_samples": fmean(age > 0 for age in staleness),
        "async/partial_samples": fmean(len(sample.weights) > 1 for sample in samples),
    }
