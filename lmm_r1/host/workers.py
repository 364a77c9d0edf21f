"""OpenRLHF's workers of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from openrlhf.trainer.ray.launcher import BaseModelActor as BaseModelActor  # base class of the workers of models
from openrlhf.trainer.ray.launcher import RayActorGroup  # starts the workers of a model
from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states as offload_deepspeed_states
from openrlhf.utils.deepspeed.deepspeed_utils import reload_deepspeed_states as reload_deepspeed_states

if TYPE_CHECKING:
    from lmm_r1.cluster.nodes import Reservation

T = TypeVar("T")


class WorkerGroup(RayActorGroup):
    """The workers of one model, each on the GPU that a reservation has for its rank.

    Methods are given as functions of the worker's class, so that a call names what it runs.
    """

    @property
    def ranks(self) -> int:
        """How many workers get different samples."""
        return len(self._actor_handlers) // self.duplicate_actors

    def start(self, method: Callable[..., Any], *given: Any, **named: Any) -> list[ray.ObjectRef]:
        """Call a method on all workers, and return references to their answers."""
        return [getattr(worker, method.__name__).remote(*given, **named) for worker in self._actor_handlers]

    def hand_out(self, shares: Sequence[Any]) -> list[ray.ObjectRef]:
        """Store one share for each rank in Ray's object store."""
        assert len(shares) == self.ranks, f"{len(shares)} shares for {self.ranks} ranks"
        return [ray.put(share) for share in shares]

    def start_shares(self, method: Callable[..., Any], shares: Sequence[ray.ObjectRef], **named: Any) -> list[Any]:
        """Call a method on all workers with the shares of their ranks, and return references to their answers."""
        return [
            getattr(worker, method.__name__).remote(shares[number // self.duplicate_actors], **named)
            for number, worker in enumerate(self._actor_handlers)
        ]

    def of_ranks(self, answers: Sequence[T]) -> Sequence[T]:
        """Return one answer for each rank from those of all workers: workers that share samples give the same."""
        return answers[:: self.duplicate_actors]

    def _initiate_actors(self, pg: Reservation, num_gpus_per_actor: float) -> None:
        """Start the workers; all but the first get the address of the first."""
        ranks = self._num_nodes * self._num_gpus_per_node
        self._actor_handlers: list[Any] = []
        address: Sequence[Any] = (None, None)
        for rank in range(ranks):
            options = {"num_cpus": num_gpus_per_actor, "num_gpus": num_gpus_per_actor}
            worker = self.ray_actor_type.options(**options, scheduling_strategy=pg.place(rank))
            self._actor_handlers.append(worker.remote(ranks, rank, *address))
            if rank == 0 and ranks > 1:
                address = ray.get(self._actor_handlers[0].get_master_addr_port.remote())
