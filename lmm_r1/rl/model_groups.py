"""The models of a run, each a group of Ray workers, and what the controller asks of them in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import in_worker
from lmm_r1.host.optimizer import LossScaling
from lmm_r1.host.workers import WorkerGroup
from lmm_r1.models.image_features import FeatureCounts
from lmm_r1.rl.mismatch import Gaps
from lmm_r1.rl.samples import Pass
from lmm_r1.rl.workers import KitCriticActor, KitPolicyActor, ModelWorker, TrainedWorker
from remote_rm.client import RewardUnavailable

P = ParamSpec("P")
T = TypeVar("T")

# An idle worker answers at once.
_ANSWER_S = 120.0


@dataclass(kw_only=True)
class Models:
    """The groups of workers of a run's models; None for a model that the run does not have."""

    policy: WorkerGroup
    critic: WorkerGroup | None = None
    reward: WorkerGroup | None = None
    reference: WorkerGroup | None = None

    @property
    def all(self) -> list[WorkerGroup]:
        """The groups that the run has."""
        groups = (self.policy, self.critic, self.reference, self.reward)
        return [group for group in groups if group is not None]

    @property
    def trained(self) -> list[WorkerGroup]:
        """The groups whose weights are updated and saved."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def ranks(self) -> int:
        """Into how many equal shares samples are divided, so that every group can spread them evenly."""
        return math.lcm(*(group.ranks for group in self.all))


def ask(group: WorkerGroup, method: Callable[Concatenate[Any, P], T], *given: P.args, **named: P.kwargs) -> list[T]:
    """Call a method on all workers of a group, and return their answers."""
    return ray.get(group.start(method, *given, **named))


def joined(shares: Sequence[Sequence[T]], ranks: int) -> list[list[T]]:
    """Return as many shares as there are ranks; consecutive ones become one."""
    size = len(shares) // ranks
    return [list(chain.from_iterable(shares[rank * size : (rank + 1) * size])) for rank in range(ranks)]


@contextmanager
def worker_errors(*, prefix: str = "") -> Iterator[None]:
    """Raise a UserError or an unavailable reward of a worker or an engine as a UserError of this process.

    Args:
        prefix: text before the worker's message.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RewardUnavailable | UserError):
            raise UserError(f"{prefix}{in_worker(error)}") from error
        raise


def trains_policy(config: PPOConfig, *, step: int) -> bool:
    """Say whether the policy is trained in a step, counted from 1: the critic may be trained alone at first."""
    return step > config.critic.freezing_steps + 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The update of one model: its workers, with what each rank trains on."""

    group: WorkerGroup
    shares: list[ray.ObjectRef]
    method: Callable[..., Any]
    named: Mapping[str, float] = field(default_factory=dict)

    def start(self) -> list[ray.ObjectRef]:
        """Start the update, and return references to the metrics."""
        return self.group.start_shares(self.method, self.shares, **self.named)


def hand_out(
    steps: Sequence[Sequence[Sequence[Pass]]], models: Models, *, trains_policy: bool, kl_weight: float
) -> list[Fit]:
    """Store the passes of every optimizer step, by rank, for the workers of each model that is trained."""
    shares: dict[int, list[ray.ObjectRef]] = {}

    def of(group: WorkerGroup) -> list[ray.ObjectRef]:
        if group.ranks not in shares:
            by_step = [joined(step, group.ranks) for step in steps]
            shares[group.ranks] = group.hand_out([list(rank) for rank in zip(*by_step, strict=True)])
        return shares[group.ranks]

    critic, policy = models.critic, models.policy
    fits = [] if critic is None else [Fit(group=critic, shares=of(critic), method=KitCriticActor.fit)]
    if trains_policy:
        named = {"kl_weight": kl_weight}
        fits.append(Fit(group=policy, shares=of(policy), method=KitPolicyActor.fit, named=named))
    return fits


def update_models(fits: Sequence[Fit], config: PPOConfig) -> dict[str, float]:
    """Update the models, and return their metrics.

    They are updated at the same time, unless they share GPUs or cores: both would then need the memory at once.
    """
    metrics: dict[str, float] = {}
    if config.ds.enable_sleep:
        for fit in fits:
            ask(fit.group, TrainedWorker.reload_states)
            metrics |= ray.get(fit.start())[0]
            ask(fit.group, TrainedWorker.offload_states)
        return metrics
    # Without CUDA all models share the processor's cores.
    in_turn = not cpu.has_cuda() or (config.train.colocate_all and not config.train.colocate_critic_reward)
    for together in [[fit] for fit in fits] if in_turn else [fits]:
        for result in ray.get([ref for fit in together for ref in fit.start()]):
            metrics |= result
    return metrics


def send_weights(policy: WorkerGroup, engines: Sequence[Any], config: PPOConfig) -> None:
    """Send the policy's weights to the engines.

    Sleeping engines get memory for their weights only; they get that of their KV cache before they generate. With
    partial rollouts the engines pause in the middle of their responses.
    """
    partial = config.train.partial_rollout_enable
    if partial:
        ray.get([engine.pause_generation.remote() for engine in engines])
    if config.vllm.enable_sleep:
        ray.get([engine.wake_up.remote(tags=["weights"]) for engine in engines])
    ask(policy, KitPolicyActor.broadcast_to_vllm)
    if partial:
        # Do not resume after a failure: the engines may hold a mix of old and new weights.
        ray.get([engine.resume_generation.remote() for engine in engines])


def updates_made(models: Models) -> list[int]:
    """Return how many updates the weights of policy and critic have had, one number per worker.

    Raises ray.exceptions.GetTimeoutError if a worker hangs, for example because it waits for one that was lost. Between
    steps all others are idle.
    """
    refs = [ref for group in models.trained for ref in group.start(TrainedWorker.updates_made)]
    return ray.get(refs, timeout=_ANSWER_S)


def take_gaps(policy: WorkerGroup) -> Sequence[Gaps]:
    """Return the gaps to the engines that the update's passes measured since this was last called."""
    # Workers that share rows know all log-probs of each row.
    return policy.of_ranks(ask(policy, KitPolicyActor.take_gaps))


def scaling_metrics(models: Models, config: PPOConfig, before: dict[str, LossScaling]) -> dict[str, float]:
    """Return the metrics of loss scaling since the last call, of policy and critic; none without fp16.

    Args:
        before: the states of the last call by the model's prefix, which become those of this call.
    """
    if config.ds.param_dtype != "fp16":
        return {}
    metrics: dict[str, float] = {}
    for prefix, group in zip(("", "critic_"), models.trained, strict=False):
        # All ranks skip the same updates.
        now = ask(group, TrainedWorker.loss_scaling)[0]
        assert now is not None, "with fp16 losses are scaled"
        metrics |= now.metrics(before.get(prefix), prefix=prefix)
        before[prefix] = now
    return metrics


def feature_metrics(models: Models) -> dict[str, float]:
    """Return how many images each model already had features of since the last call, and how much is kept."""
    groups = {"policy": models.policy, "reference": models.reference, "critic": models.critic}
    metrics: dict[str, float] = {}
    for role, group in groups.items():
        if group is not None:
            metrics |= FeatureCounts.total(ask(group, ModelWorker.take_feature_counts)).metrics(role)
    return metrics
