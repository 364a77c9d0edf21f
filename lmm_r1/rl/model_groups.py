"""The models of a run, each a group of Ray workers, and what the controller asks of them in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import in_worker
from lmm_r1.host.openrlhf import Experience, batch_vllm_engine_call
from lmm_r1.host.optimizer import LossScaling
from lmm_r1.host.workers import RayActorGroup
from lmm_r1.models.image_features import FeatureCounts
from lmm_r1.rl.batching import data_parallel_size
from lmm_r1.rl.mismatch import Gaps
from remote_rm.client import RewardUnavailable

# An idle worker answers at once.
_ANSWER_S = 120.0


@dataclass(kw_only=True)
class Models:
    """The groups of workers of a run's models; None for a model that the run does not have."""

    policy: RayActorGroup
    critic: RayActorGroup | None = None
    reward: RayActorGroup | None = None
    reference: RayActorGroup | None = None

    @property
    def all(self) -> list[RayActorGroup]:
        """The groups that the run has."""
        groups = (self.policy, self.critic, self.reference, self.reward)
        return [group for group in groups if group is not None]

    @property
    def trained(self) -> list[RayActorGroup]:
        """The groups whose weights are updated and saved."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def ranks(self) -> int:
        """Into how many equal shares samples are divided, so that every group can spread them evenly."""
        return math.lcm(*map(data_parallel_size, self.all))


def ask(group: RayActorGroup, method: str, **given: Any) -> list[Any]:
    """Call a method on all workers of a group, and return their answers."""
    return ray.get(group.async_run_method(method_name=method, **given))


def ask_all(groups: Sequence[RayActorGroup], method: str, *, timeout: float | None = None, **given: Any) -> list[Any]:
    """Call a method on all workers of several groups at the same time, and return their answers."""
    refs = [ref for group in groups for ref in group.async_run_method(method_name=method, **given)]
    return ray.get(refs, timeout=timeout)


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


def hand_out(steps: Sequence[list[Experience]], groups: Sequence[RayActorGroup]) -> None:
    """Send the workers of each group the passes of every optimizer step.

    Send none to a model that is not trained in this step: its workers would keep them, and train on them in a later one.
    """
    ray.get(
        [
            ref
            for passes in steps
            for group in groups
            for ref in group.async_run_method_batch(method_name="append", experience=passes)
        ]
    )


def shares_device_with_critic(config: PPOConfig) -> bool:
    """Say whether policy and critic are on the same GPUs; without CUDA all models share the processor's cores."""
    return not cpu.has_cuda() or (bool(config.train.colocate_all) and not config.train.colocate_critic_reward)


def update_models(models: Models, config: PPOConfig, *, trains_policy: bool, kl_weight: float) -> dict[str, float]:
    """Update critic and policy on the passes that they were sent, and return their metrics.

    They are updated at the same time, unless they share GPUs or cores: both would then need the memory at once.
    """
    fits: list[tuple[RayActorGroup, dict[str, float]]] = [] if models.critic is None else [(models.critic, {})]
    if trains_policy:
        fits.append((models.policy, {"kl_ctl": kl_weight}))
    metrics: dict[str, float] = {}
    if config.ds.enable_sleep:
        for group, given in fits:
            ask(group, "reload_states")
            metrics |= ask(group, "fit", **given)[0]
            ask(group, "offload_states")
        return metrics
    in_turn = models.critic is not None and shares_device_with_critic(config)
    for together in [[fit] for fit in fits] if in_turn else [fits]:
        refs = [ref for group, given in together for ref in group.async_run_method(method_name="fit", **given)]
        for result in ray.get(refs):
            metrics |= result
    return metrics


def send_weights(policy: RayActorGroup, engines: Sequence[Any], config: PPOConfig) -> None:
    """Send the policy's weights to the engines.

    Sleeping engines get memory for their weights only; they get that of their KV cache before they generate. With
    partial rollouts the engines pause in the middle of their responses.
    """
    partial = config.train.partial_rollout_enable
    if partial:
        batch_vllm_engine_call(engines, "pause_generation")
    if config.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "wake_up", tags=["weights"])
    ask(policy, "broadcast_to_vllm")
    if partial:
        # Do not resume after a failure: the engines may hold a mix of old and new weights.
        batch_vllm_engine_call(engines, "resume_generation")


def wake(engines: Sequence[Any], config: PPOConfig) -> None:
    """Give sleeping engines their memory back; engines that woke up for new weights get that of their KV cache."""
    if config.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "wake_up")


def sleep(engines: Sequence[Any], config: PPOConfig) -> None:
    """Free the engines' memory while the models train."""
    if config.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "sleep")


def updates_made(models: Models) -> list[int]:
    """Return how many updates the weights of policy and critic have had, one number per worker.

    Raises ray.exceptions.GetTimeoutError if a worker hangs, for example because it waits for one that was lost. Between
    steps all others are idle.
    """
    return ask_all(models.trained, "updates_made", timeout=_ANSWER_S)


def take_computed_tokens(policy: RayActorGroup) -> int:
    """Return how many tokens the policy's workers have computed since this was last called."""
    # Workers that share rows count all tokens of each row.
    return sum(ask(policy, "take_computed_tokens")[:: policy.duplicate_actors])


def take_gaps(policy: RayActorGroup) -> list[Gaps]:
    """Return the gaps to the engines that the update's passes measured since this was last called."""
    # Workers that share rows know all log-probs of each row.
    return ask(policy, "take_gaps")[:: policy.duplicate_actors]


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
        now = ask(group, "loss_scaling")[0]
        metrics |= now.metrics(before.get(prefix), prefix=prefix)
        before[prefix] = now
    return metrics


def feature_metrics(groups: Mapping[str, RayActorGroup | None]) -> dict[str, float]:
    """Return how many images each model already had features of since the last call, and how much is kept.

    Args:
        groups: the workers of each model, by its role; None for a model that the run does not have.
    """
    metrics: dict[str, float] = {}
    for role, group in groups.items():
        if group is not None:
            metrics |= FeatureCounts.total(ask(group, "take_feature_counts")).metrics(role)
    return metrics
