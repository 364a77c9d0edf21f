"""What a rollout's samples are trained with: rewards, log-probs, values, the KL and advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import ray
import torch

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig
from lmm_r1.errors import UserError
from lmm_r1.host.workers import WorkerGroup
from lmm_r1.models.packed.packing import stacked
from lmm_r1.rl.advantages import RewardedRollout, estimator_named, group_deviations
from lmm_r1.rl.losses import estimated_kl
from lmm_r1.rl.mismatch import Mismatch
from lmm_r1.rl.model_groups import Models, ask, joined
from lmm_r1.rl.samples import Pass, PassLimits, TrainingSample, forward_passes
from lmm_r1.rl.workers import KitPolicyActor, ModelWorker

T = TypeVar("T")
SOURCES = {
    "reward": "check what --reward.remote_url or --reward.model_name_or_path gives for it",
    "advantage": "check the critic's values and the log-probs of policy and reference model",
}


def is_on_policy(config: PPOConfig) -> bool:
    """Say whether a rollout is trained on in one optimizer step, in whose own pass the policy is still the old one.

    The old log-probs then need no pass of their own, unless rewards depend on them.
    """
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    in_reward = config.algo.kl.init_coef > 0 and not config.algo.kl.use_loss
    one_step = config.train.batch_size >= samples and config.train.max_epochs == 1
    return one_step and not in_reward and config.ds.lora.dropout == 0


def add_model_outputs(
    samples: Sequence[TrainingSample],
    models: Models,
    config: PPOConfig,
    *,
    limits: PassLimits,
    mismatch: Mismatch,
) -> None:
    """Run the models on a rollout, add what they give, and measure how far the engines' log-probs are from the policy's.

    Raises UserError if they are too far apart.
    """
    one_update = is_on_policy(config)
    # One update's own pass gives the old log-probs, but the first step compares them with the engines' before it.
    old_log_probs = not (one_update and mismatch.checked)
    passes = forward_passes(samples, ranks=models.ranks, limits=limits)
    run_models(passes, models, config, old_log_probs=old_log_probs)
    for sample in samples:
        _add_kl(sample, config)
    if old_log_probs:
        mismatch.measure(samples)
    if one_update:
        for sample in samples:
            sample.log_probs = None


def run_models(
    passes: Sequence[Sequence[Pass]],
    models: Models,
    config: PPOConfig,
    *,
    old_log_probs: bool,
) -> None:
    """Run the models on the passes of each rank, and note what they give in the samples.

    Models that share GPUs run one after the other.

    Args:
        old_log_probs: whether the policy is run; if not, the update's own pass gives them.
    """
    train = config.train
    with_reference = bool(train.colocate_all or train.colocate_actor_ref)
    started: list[tuple[str, WorkerGroup, list[ray.ObjectRef]]] = []
    if passes[0][0][0].reward is None:
        assert models.reward is not None, "refused by config.resolve"
        refs = _start(models.reward, ModelWorker.forward, passes, wait=bool(train.colocate_all))
        started.append(("reward", models.reward, refs))
    if old_log_probs:
        refs = _start(models.policy, ModelWorker.forward, passes, wait=with_reference)
        started.append(("log_probs", models.policy, refs))
    if models.critic is not None:
        if train.colocate_critic_reward and started and started[0][0] == "reward":
            ray.get(started[0][2])
            ask(started[0][1], ModelWorker.empty_cache)
        with_reward = bool(train.colocate_all or train.colocate_critic_reward)
        refs = _start(models.critic, ModelWorker.forward, passes, wait=with_reward)
        started.append(("values", models.critic, refs))
    refers_to = models.policy if config.refers_to_base else models.reference
    if refers_to is not None:
        method = KitPolicyActor.reference_forward if config.refers_to_base else ModelWorker.forward
        started.append(("reference_log_probs", refers_to, _start(refers_to, method, passes, wait=with_reference)))
    samples = [sample for rank in passes for one in rank for sample in one]
    for name, group, refs in started:
        for sample, found in zip(samples, collected(group, refs), strict=True):
            if name == "reward":
                sample.reward = sample.logged["reward"] = found.item()
            else:
                setattr(sample, name, found)


def _start(
    group: WorkerGroup, method: Callable[..., Any], passes: Sequence[Sequence[Pass]], *, wait: bool
) -> list[ray.ObjectRef]:
    """Start one model's passes, and wait for them if another model needs its GPUs.

    Without CUDA always wait: two models at a time slow one another down on the same cores.
    """
    refs = group.start_shares(method, group.hand_out(joined(passes, group.ranks)))
    if wait:
        ray.get(refs)
        ask(group, ModelWorker.empty_cache)
    if not cpu.has_cuda():
        ray.wait(refs, num_returns=len(refs), fetch_local=False)
    return refs


def collected(group: WorkerGroup, refs: Sequence[ray.ObjectRef]) -> Iterator[torch.Tensor]:
    """Yield one model's outputs for the samples of all passes, in their order."""
    return chain.from_iterable(chain.from_iterable(group.of_ranks(ray.get(list(refs)))))


def _add_kl(sample: TrainingSample, config: PPOConfig) -> None:
    """Add the KL between policy and reference, which reduces the rewards unless it is in the loss."""
    kl, mask = config.algo.kl, sample.loss_mask
    difference = torch.zeros_like(mask, dtype=torch.float)
    sample.kl = torch.zeros_like(difference)
    if kl.use_loss:
        return
    if sample.reference_log_probs is not None:
        assert sample.log_probs is not None, "the KL in the reward needs them"
        difference = sample.log_probs.float() - sample.reference_log_probs.float()
        sample.kl = estimated_kl(difference, estimator=kl.estimator)
    count = mask.sum().clamp(min=1)
    sample.logged["kl"] = ((sample.kl * mask).sum() / count).item()
    sample.logged["logprobs_diff"] = ((difference * mask).sum() / count).item()


def shape_rewards(samples: Sequence[TrainingSample], config: PPOConfig) -> None:
    """Change the rewards of long and truncated responses, then clip all of them to `--reward.clip_range`.

    A response that reaches into the buffer before the limit pays in proportion (DAPO, arXiv:2503.14476).
    """
    settings = config.reward
    low, high = settings.clip_range
    limit = config.rollout.max_new_tokens or config.data.max_len
    for sample in samples:
        reward = _given(sample.reward)
        if (buffer := settings.overlong_buffer_len) is not None:
            exceeding = min(max(sample.response_tokens - (limit - buffer), 0.0), buffer)
            reward -= exceeding / buffer * settings.overlong_penalty_factor
        scale = settings.stop_properly_penalty_coef
        if scale is not None and sample.truncated:
            reward = scale if scale < 0 else reward * scale
        sample.reward = min(max(reward, low), high)
        if "reward" in sample.logged:
            sample.logged["reward"] = sample.reward


def add_advantages(
    samples: Sequence[TrainingSample], config: PPOConfig, *, kl_weight: float, greedy: Sequence[TrainingSample] = ()
) -> None:
    """Add penalties to the rewards, then the advantages and returns of `--algo.advantage.estimator`.

    Raises UserError, before any weight changes, if a reward or an advantage is not finite.

    Args:
        samples: of a whole rollout, in order.
        greedy: the greedy response to each prompt, if the estimator compares with one.
    """
    for sample in samples:
        _check_finite(sample, _given(sample.reward), what="reward")
    shape_rewards([*samples, *greedy], config)
    rollout = _rewarded_rollout(samples, config, kl_weight=kl_weight, greedy=greedy)
    if config.rollout.n_samples_per_prompt > 1:
        deviations = group_deviations(rollout.rewards, rollout.counted).expand_as(rollout.rewards).flatten().tolist()
        for sample, deviation in zip(samples, deviations, strict=True):
            sample.logged["group_reward_std"] = deviation
    estimate = estimator_named(config.algo.advantage.estimator)(rollout)
    for place, sample in enumerate(samples):
        width = len(sample.loss_mask)
        sample.advantages, sample.returns = estimate.advantages[place, :width], estimate.returns[place, :width]
        # One bad value makes a whole whitened batch non-finite; returns still show which sample it is.
        counted = torch.where(sample.loss_mask, sample.returns, 0.0)
        _check_finite(sample, counted.sum().item(), what="advantage")
        if sample.masked:
            # It teaches neither policy nor critic anything.
            sample.advantages = torch.zeros_like(sample.advantages)
            sample.returns = sample.returns if sample.values is None else sample.values
        # A masked sample has no last token: its reward is in the last column.
        sample.logged["return"] = estimate.token_rewards[place].sum().item()
        sample.kl = None
    for group in range(0, len(samples), config.rollout.n_samples_per_prompt):
        members = samples[group : group + config.rollout.n_samples_per_prompt]
        silent = not any((_given(one.advantages) * one.loss_mask).any() for one in members)
        for one in members:
            one.logged["groups_without_signal"] = float(silent)


def _rewarded_rollout(
    samples: Sequence[TrainingSample], config: PPOConfig, *, kl_weight: float, greedy: Sequence[TrainingSample]
) -> RewardedRollout:
    """Return the estimator's input: the rewards by groups, in double precision, and the tokens of all samples."""
    size, settings = config.rollout.n_samples_per_prompt, config.algo.advantage
    for number, sample in enumerate(samples):
        assert (sample.place, sample.group) == (number, number // size), "whole groups, in the rollout's order"
    counted = torch.tensor([not sample.masked for sample in samples])
    return RewardedRollout(
        rewards=torch.tensor([_given(sample.reward) for sample in samples], dtype=torch.double).view(-1, size),
        counted=None if counted.all() else counted.view(-1, size),
        mask=stacked(samples, lambda sample: sample.loss_mask * (not sample.masked)).long(),
        kl=stacked(samples, lambda sample: _given(sample.kl)),
        values=None if samples[0].values is None else stacked(samples, lambda sample: _given(sample.values)),
        kl_coef=kl_weight,
        gamma=settings.gamma,
        lambd=settings.lambd,
        divide=not settings.no_std_norm,
        greedy=torch.tensor([[_given(sample.reward)] for sample in greedy], dtype=torch.double) if greedy else None,
    )


def _given(value: T | None) -> T:
    assert value is not None, "added before"
    return value


def _check_finite(sample: TrainingSample, value: float, *, what: str) -> None:
    """Raise UserError if a sample's value is not finite."""
    if not math.isfinite(value):
        raise UserError(
            f"{sample.location}: the {what} of a response is {value}, which cannot be trained on; {SOURCES[what]}"
        )
