"""The automatic restart of a run that lost a worker: which failures restart it from its last saved step, and how often."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from rich.console import Console
from vllm.v1.engine.exceptions import EngineDeadError

from lmm_r1.errors import UserError
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.train.stopping import StopRequests

# Failures of processes, nodes and the network; DistError comes from NCCL or from the store where ranks meet.
_LOSSES = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    LocalRayletDiedError,
    GetTimeoutError,
    EngineDeadError,
    dist.DistError,
)
# Ray notices the death of a process within moments; other workers may see a closed connection before.
_PATIENCE_S = 10.0
# The part of a message that stays the same if the same worker is lost again.
_WHO = re.compile(r"^\s*class_name: (\S+)$", re.MULTILINE)


@dataclass(kw_only=True)
class Restarts:
    """Repeats a session of a run from its last checkpoint after it lost a worker, at most `limit` times."""

    limit: int
    """`--ckpt.max_restarts`."""
    folder: RunFolder
    stops: StopRequests
    saved_step: Callable[[], int]
    """Returns the step that the run would resume from now; 0 if nothing is saved."""
    made: int = 0
    _workers: Sequence[Any] = field(default=(), init=False)
    _before: tuple[int | None, str] | None = field(default=None, init=False)

    def watch(self, workers: Sequence[Any]) -> None:
        """Note the handles of the session's workers; some may be dead when it fails."""
        self._workers = workers

    def run(self, session: Callable[[], None]) -> None:
        """Run a session to its end, and repeat it if it lost a worker.

        Raises the session's error if it is the user's or of another kind, if a stop was requested, beyond the limit, and
        if the same worker is lost at the same step twice in a row.
        """
        while True:
            progress, self._workers = self.stops.progress, ()
            try:
                return session()
            except Exception as error:
                if self.limit == 0 or self.stops.asked:
                    raise
                lost = loss(error, self._workers)
                # Until a session trains, this is the progress of the previous one.
                reached = self.stops.progress() if self.stops.progress is not progress else None
                if lost is None or not self._goes_on(lost, step=None if reached is None else reached.step):
                    raise

    def _goes_on(self, lost: str, *, step: int | None) -> bool:
        """Count a loss, print it, and say whether the run restarts, in which case its workers are ended.

        Args:
            step: the last step of the session; None if it failed before training.
        """
        where = "while it started" if step is None else f"after step {step}"
        again, self._before = self._before == (step, lost), (step, lost)
        if again:
            self._print(f"lost the same twice in a row {where} ({lost}), which another restart would not fix")
            return False
        if self.made == self.limit:
            return False
        self.made += 1
        # End the workers first: none may save while the checkpoints are read.
        tear_down(self._workers)
        saved = self.saved_step()
        self.folder.restarted(number=self.made, step=step, saved=saved, lost=lost)
        self._print(f"lost a worker {where} ({lost}); restart {self.made} of {self.limit} from step {saved}")
        return True

    def _print(self, what: str) -> None:
        Console(highlight=False, soft_wrap=True).print(f"{self.folder.name} {what}", markup=False)


def loss(error: Exception, workers: Sequence[Any]) -> str | None:
    """Return what was lost, in the same words for the same loss; None if the failure is not a loss.

    Args:
        workers: handles of Ray actors; if one of them is dead, failures of others are a consequence.
    """
    if isinstance(error, UserError):
        return None
    for cause in _causes(error):
        # A constructor that failed would fail again.
        if isinstance(cause, _LOSSES) and not (isinstance(cause, RayActorError) and cause.actor_init_failed):
            return _words(cause)
    dead = _dead(workers)
    return None if dead is None else _words(dead)


def tear_down(workers: Sequence[Any]) -> None:
    """End the session's workers and whatever else it has in Ray."""
    if not ray.is_initialized():
        return
    for worker in workers:
        # Workers that wait for a dead one would not end by themselves for an hour.
        ray.kill(worker)
    ray.shutdown()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; for an error of a worker, the worker's own error, as far as Ray passes it on."""
    while error is not None:
        if isinstance(error, RayTaskError):
            error = error.cause
        else:
            yield error
            error = error.__cause__


def _dead(workers: Sequence[Any]) -> RayActorError | None:
    """Return the error of the first dead worker, None if all are alive."""
    refs = [worker.__ray_ready__.remote() for worker in workers]
    waiting = refs
    while waiting:
        done, waiting = ray.wait(waiting, timeout=_PATIENCE_S)
        if not done:
            # A worker that hangs is alive.
            return None
        try:
            ray.get(done)
        except RayActorError as error:
            return None if error.actor_init_failed else error
    return None


def _words(cause: BaseException) -> str:
    """Return the kind of an error, the worker that it is about, and its first line."""
    text = str(cause)
    who = _WHO.search(text)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    # The numbers of actors, processes and ports differ each time.
    said = line if who or not isinstance(cause, ObjectLostError | GetTimeoutError) else ""
    return ": ".join(filter(None, (type(cause).__name__, who and who[1], said)))
