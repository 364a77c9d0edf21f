"""A run that lost a worker goes on by itself from its last saved step: which failures those are, and when it gives up."""

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
from lmm_r1.lifecycle.stopping import StopRequests
from lmm_r1.records.run_folder import RunFolder

# Of processes, nodes and the network between them; DistError is NCCL's and that of the store that ranks meet at.
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
# Ray knows of a process's death within moments; other workers may be told of a closed connection before.
_PATIENCE_S = 10.0
# What stays the same where the same worker is lost once more.
_WHO = re.compile(r"^\s*class_name: (\S+)$", re.MULTILINE)


@dataclass(kw_only=True)
class Restarts:
    """Runs a session of a run again, from what is saved, when it lost a worker: `limit` times at most."""

    limit: int
    """`--ckpt.max_restarts`."""
    folder: RunFolder
    stops: StopRequests
    saved_step: Callable[[], int]
    """Returns the step that the run would go on from now; 0 where nothing is saved."""
    made: int = 0
    _workers: Sequence[Any] = field(default=(), init=False)
    _before: tuple[int | None, str] | None = field(default=None, init=False)

    def watch(self, workers: Sequence[Any]) -> None:
        """Take the handles of the session's workers, of which some may be dead when it fails."""
        self._workers = workers

    def run(self, session: Callable[[], None]) -> None:
        """Run a session to its end, and again where it lost a worker.

        Raises what a session raises: for what the user did, for a failure of another kind, when a stop was asked for,
        beyond the limit, and where the same is lost at the same step twice in a row.
        """
        while True:
            progress, self._workers = self.stops.progress, ()
            try:
                return session()
            except Exception as error:
                if self.limit == 0 or self.stops.asked:
                    raise
                lost = loss(error, self._workers)
                # Until a session trains, the progress is that of the session before.
                reached = self.stops.progress() if self.stops.progress is not progress else None
                if lost is None or not self._goes_on(lost, step=None if reached is None else reached.step):
                    raise

    def _goes_on(self, lost: str, *, step: int | None) -> bool:
        """Count a loss, tell of it, and say whether the run goes on; its workers are ended then.

        Args:
            step: the last that the session made; None where it did not come to train.
        """
        where = "while it started" if step is None else f"after step {step}"
        again, self._before = self._before == (step, lost), (step, lost)
        if again:
            self._tell(f"lost the same twice in a row {where} ({lost}), which another restart would not mend")
            return False
        if self.made == self.limit:
            return False
        self.made += 1
        # First: what still saves, must not while the checkpoints are looked at.
        tear_down(self._workers)
        saved = self.saved_step()
        self.folder.restarted(number=self.made, step=step, saved=saved, lost=lost)
        self._tell(f"lost a worker {where} ({lost}); restart {self.made} of {self.limit} from step {saved}")
        return True

    def _tell(self, what: str) -> None:
        Console(highlight=False, soft_wrap=True).print(f"{self.folder.name} {what}", markup=False)


def loss(error: Exception, workers: Sequence[Any]) -> str | None:
    """Return what was lost, in words that are the same for the same loss; None where the failure is no loss.

    Args:
        workers: handles of Ray actors; where one of them is dead, a failure of another comes of that.
    """
    if isinstance(error, UserError):
        return None
    for cause in _causes(error):
        # A constructor that raises would raise again.
        if isinstance(cause, _LOSSES) and not (isinstance(cause, RayActorError) and cause.actor_init_failed):
            return _words(cause)
    dead = _dead(workers)
    return None if dead is None else _words(dead)


def tear_down(workers: Sequence[Any]) -> None:
    """End the session's workers and whatever else it has in Ray."""
    if not ray.is_initialized():
        return
    for worker in workers:
        # Those that wait for a dead one would not end by themselves for an hour.
        ray.kill(worker)
    ray.shutdown()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it comes from; of one that a worker raised, its own error, as far as Ray hands it on."""
    while error is not None:
        if isinstance(error, RayTaskError):
            error = error.cause
        else:
            yield error
            error = error.__cause__


def _dead(workers: Sequence[Any]) -> RayActorError | None:
    """Return how the first dead worker died, None where all live."""
    refs = [worker.__ray_ready__.remote() for worker in workers]
    waiting = refs
    while waiting:
        done, waiting = ray.wait(waiting, timeout=_PATIENCE_S)
        if not done:
            # What hangs, lives.
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
    # An actor's number, and that of a process or a port, are others each time.
    said = line if who or not isinstance(cause, ObjectLostError | GetTimeoutError) else ""
    return ": ".join(filter(None, (type(cause).__name__, who and who[1], said)))
