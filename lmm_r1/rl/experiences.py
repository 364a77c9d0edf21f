"""What a rollout's samples are trained with: rewards, log-probs, values, the KL and advantages."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ray
import torch
from torch.nn.functional import pad

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import AHEAD_TOKENS
from lmm_r1.data.sample import Sample, media_before
from lmm_r1.errors import UserError
from lmm_r1.host.openrlhf import Experience
from lmm_r1.host.workers import RayActorGroup
from lmm_r1.rl.advantages import RewardedPass, RewardedRollout, estimator_named, group_deviations
from lmm_r1.rl.batching import PassLimits, data_parallel_size, forward_plan, pass_of, sample_sizes
from lmm_r1.rl.mismatch import Mismatch, modality_info, modality_of
from lmm_r1.rl.model_groups import Models, ask
from lmm_r1.rl.workers import model_inputs

REWARD_SOURCES = "check what --reward.remote_url or --reward.model_name_or_path gives for it"
ADVANTAGE_SOURCES = (
    "its reward is finite, so check the critic's values and the log-probs of policy and reference model, from which the "
    "KL in the reward is computed"
)
# The k3 estimator reaches its bound long before; a smaller log-ratio would overflow its exponential.
_LEAST_LOG_RATIO = -10.0
_LARGEST_KL = 10.0


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """What the models give for a rollout, one tensor per sample; None for a model that is not run."""

    rewards: list[torch.Tensor] | None
    """(1,) each; the others are (1, A) each."""
    log_probs: list[torch.Tensor] | None
    values: list[torch.Tensor] | None
    reference_log_probs: list[torch.Tensor] | None


def experience_of(sample: Sample, *, max_len: int, place: int = 0, masks: bool = False) -> Experience:
    """Return a sample as a batch of one, whose masks and log-probs are about the next token at each place.

    Its `info` holds values of which the workers log the means.

    Args:
        place: its place in the rollout.
        masks: whether single responses may be masked, in addition to episodes.
    """
    token_ids, log_probs = sample.token_ids, sample.log_probs
    assert len(token_ids) <= max_len, f"{sample.row.location}: no engine gives {len(token_ids)} of {max_len} tokens"
    reward = sample.reward
    values = {} if reward is None else {"reward": reward.reward, "score": reward.score, **reward.parts}
    info = {name: torch.tensor([value]) for name, value in values.items()}
    if masks or sample.played is not None:
        info["masked"] = torch.tensor([sample.masked])
    return Experience(
        sequences=torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        action_mask=torch.tensor([sample.loss_mask[1:]]).long(),
        rollout_log_probs=None if log_probs is None else torch.tensor([log_probs[1:]]),
        prompts=[sample.prompt],
        labels=[sample.label],
        images=[None],
        mm_train_inputs=[sample.media or None],
        rewards=None if reward is None else torch.tensor([reward.reward]),
        scores=None if reward is None else torch.tensor([reward.score]),
        response_length=torch.tensor([sample.generated_tokens]),
        truncated=torch.tensor([sample.truncated]),
        total_length=torch.tensor([float(len(token_ids))]),
        index=[place],
        info=info | modality_info(modality_of(sample.row)),
    )


def is_on_policy(config: PPOConfig) -> bool:
    """Say whether a rollout is trained on in one optimizer step, in whose own pass the policy is still the old one.

    The old log-probs then need no pass of their own, unless rewards depend on them.
    """
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    in_reward = config.algo.kl.init_coef > 0 and not config.algo.kl.use_loss
    one_step = config.train.batch_size >= samples and config.train.max_epochs == 1
    return one_step and not in_reward and config.ds.lora.dropout == 0


def add_model_outputs(
    samples: Sequence[Experience],
    models: Models,
    config: PPOConfig,
    *,
    limits: PassLimits,
    mismatch: Mismatch,
    ahead: ReferenceAhead | None = None,
) -> None:
    """Run the models on a rollout, add what they give, and measure how far the engines' log-probs are from the policy's.

    Raises UserError if they are too far apart.

    Args:
        limits: of a pass.
        ahead: the reference's passes, if they were started during generation.
    """
    one_update = is_on_policy(config)
    # One update's own pass gives the old log-probs, but the first step compares them with the engines' before it.
    old_log_probs = not (one_update and mismatch.checked)
    plan = forward_plan(samples, ranks=models.ranks, limits=limits)
    outputs = run_models(samples, plan, models, config, old_log_probs=old_log_probs, ahead=ahead)
    add_outputs(samples, outputs, config)
    if old_log_probs:
        mismatch.measure(samples)
    if one_update:
        for sample in samples:
            sample.action_log_probs = None


def run_models(
    samples: Sequence[Experience],
    plan: Sequence[Sequence[int]],
    models: Models,
    config: PPOConfig,
    *,
    old_log_probs: bool,
    ahead: ReferenceAhead | None = None,
) -> ModelOutputs:
    """Run the models on the passes of a plan and return their outputs: models that share GPUs run one after the other.

    Args:
        old_log_probs: whether the policy is run; if not, the update's own pass gives them.
        ahead: the reference's passes, if they were started during generation.
    """
    train = config.train
    passes = [pass_of([samples[place] for place in batch]) for batch in plan]
    inputs, masks = model_inputs(passes), [one.action_mask for one in passes]
    with_reference = bool(train.colocate_all or train.colocate_actor_ref)
    if ahead is not None and with_reference:
        ahead.wait()
        assert models.reference is not None, "refused by config.checks"
        ask(models.reference, "empty_cache")
    rewards = policy = values = reference = None
    if samples[0].rewards is None:
        assert models.reward is not None, "refused by config.checks"
        rewards = _start(models.reward, wait=bool(train.colocate_all), **inputs)
    if old_log_probs:
        policy = _start(models.policy, wait=with_reference, action_mask=masks, **inputs)
    if models.critic is not None:
        if train.colocate_critic_reward and rewards is not None and models.reward is not None:
            ray.get(rewards)
            ask(models.reward, "empty_cache")
        with_reward = bool(train.colocate_all or train.colocate_critic_reward)
        values = _start(models.critic, wait=with_reward, action_mask=masks, **inputs)
    refers_to = models.policy if config.refers_to_base else models.reference
    if refers_to is not None and ahead is None:
        method = "reference_forward" if config.refers_to_base else "forward"
        reference = _start(refers_to, method, wait=with_reference, action_mask=masks, **inputs)

    def collected(refs: list[ray.ObjectRef] | None, group: RayActorGroup | None) -> list[torch.Tensor] | None:
        return None if refs is None or group is None else _per_sample(_collected(refs, group), samples, plan)

    return ModelOutputs(
        rewards=collected(rewards, models.reward),
        log_probs=collected(policy, models.policy),
        values=collected(values, models.critic),
        reference_log_probs=collected(reference, refers_to) if ahead is None else ahead.log_probs(),
    )


def _start(group: RayActorGroup, method: str = "forward", *, wait: bool, **inputs: Any) -> list[ray.ObjectRef]:
    """Start one model's passes, and wait for them if another model needs its GPUs.

    Without CUDA always wait: two models at a time slow one another down on the same cores.
    """
    refs = group.async_run_method_batch(method_name=method, **inputs)
    if wait:
        ray.get(refs)
        ask(group, "empty_cache")
    if not cpu.has_cuda():
        ray.wait(refs, num_returns=len(refs), fetch_local=False)
    return refs


def _collected(refs: Sequence[ray.ObjectRef], group: RayActorGroup) -> list[torch.Tensor]:
    """Return one model's outputs, one per pass; of workers that share samples only the first answers."""
    return [output for part in ray.get(refs)[:: group.duplicate_actors] for output in part]


def _per_sample(
    outputs: Sequence[torch.Tensor], samples: Sequence[Experience], plan: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Return each sample's part of the outputs of passes, without padding."""
    found: dict[int, torch.Tensor] = {}
    for batch, rows in zip(plan, outputs, strict=True):
        for place, row in zip(batch, rows, strict=True):
            # (1,) for a reward, (1, A) for the others.
            found[place] = row[None] if row.dim() == 0 else row[None, : samples[place].sequences.numel() - 1]
    return [found[place] for place in range(len(samples))]


def add_outputs(samples: Sequence[Experience], outputs: ModelOutputs, config: PPOConfig) -> None:
    """Add the models' outputs to the samples, with the KL between policy and reference."""
    kl = config.algo.kl
    for place, sample in enumerate(samples):
        if outputs.rewards is not None:
            sample.rewards = sample.info["reward"] = outputs.rewards[place]
        if outputs.values is not None:
            sample.values = outputs.values[place]
        if outputs.log_probs is not None:
            sample.action_log_probs = outputs.log_probs[place]
        mask = sample.action_mask
        sample.kl = difference = torch.zeros_like(mask, dtype=torch.float)  # (1, A)
        if outputs.reference_log_probs is not None:
            reference = outputs.reference_log_probs[place]
            if kl.use_loss:
                sample.base_action_log_probs = reference
            else:
                difference = sample.action_log_probs.float() - reference.float()
                sample.kl = estimated_kl(difference, estimator=kl.estimator)
        sample.info["kl"] = _means(sample.kl, mask)
        sample.info["logprobs_diff"] = _means(difference, mask)


def estimated_kl(log_ratios: torch.Tensor, *, estimator: str) -> torch.Tensor:
    """Return the KL divergence of each token by the log-ratios log p - log q of samples from p.

    The estimators are those of joschu.net/blog/kl-approx.html, bounded as in OpenRLHF.
    """
    if estimator == "k1":
        found = log_ratios
    elif estimator == "k2":
        found = log_ratios**2 / 2.0
    else:
        assert estimator == "k3", "refused by config.checks"
        bounded = log_ratios.clamp(min=_LEAST_LOG_RATIO)
        found = (-bounded).exp() - 1 + bounded
    return found.clamp(min=-_LARGEST_KL, max=_LARGEST_KL)


def shape_rewards(experiences: Sequence[Experience], config: PPOConfig) -> None:
    """Change the rewards of long and truncated responses, then clip all of them to `--reward.clip_range`.

    A response that reaches into the buffer before the limit pays in proportion (DAPO, arXiv:2503.14476).
    """
    reward = config.reward
    if reward.overlong_buffer_len is not None:
        buffer, limit = reward.overlong_buffer_len, config.rollout.max_new_tokens or config.data.max_len
        for experience in experiences:
            exceeding = (experience.response_length.double() - (limit - buffer)).clamp(min=0, max=buffer)
            penalties = -exceeding / buffer * reward.overlong_penalty_factor
            experience.rewards = experience.rewards + penalties.to(experience.rewards.dtype)
    scale = reward.stop_properly_penalty_coef
    if scale is not None:
        for experience in experiences:
            if experience.truncated is not None:
                rewards = experience.rewards
                cut = torch.full_like(rewards, scale) if scale < 0 else rewards * scale
                experience.rewards = torch.where(experience.truncated.bool(), cut, rewards)
    for experience in experiences:
        experience.rewards = experience.rewards.clamp(*reward.clip_range)
        if "reward" in experience.info:
            experience.info["reward"] = experience.rewards.clone()


def add_advantages(
    samples: Sequence[Experience],
    config: PPOConfig,
    *,
    kl_weight: float,
    locations: Sequence[str] = (),
    greedy: Sequence[Experience] = (),
) -> None:
    """Add penalties to the rewards, then the advantages and returns of `--algo.advantage.estimator`.

    Raises UserError, before any weight changes, if a reward or an advantage is not finite.

    Args:
        locations: where the prompt of each sample of the rollout comes from, for errors.
        greedy: the greedy response to each prompt, if the estimator compares with one.
    """
    for sample in samples:
        sample.rewards = sample.rewards.to(torch.promote_types(sample.rewards.dtype, torch.float))
        _check_finite(sample, sample.rewards, what="reward", locations=locations)
    shape_rewards(samples, config)
    rollout = _rewarded_rollout(samples, config, kl_weight=kl_weight, greedy=greedy)
    if config.rollout.n_samples_per_prompt > 1:
        deviations = group_deviations(rollout.rewards, rollout.counted).expand_as(rollout.rewards).flatten().float()
        for sample in samples:
            sample.info["group_reward_std"] = deviations[sample.index]
    estimate = estimator_named(config.algo.advantage.estimator)(rollout)
    (every_reward,), (every_advantage,), (every_return,) = (
        estimate.token_rewards,
        estimate.advantages,
        estimate.returns,
    )
    end = 0
    for sample in samples:
        count, width = sample.action_mask.shape
        rows, end = slice(end, end + count), end + count
        advantages, returns = every_advantage[rows, :width], every_return[rows, :width]
        # One bad value makes a whole whitened batch non-finite; returns still show which sample it is.
        counted = torch.where(sample.action_mask.bool(), returns, 0.0)
        _check_finite(sample, counted.sum(dim=-1), what="advantage", locations=locations)
        sample.advantages, sample.returns = _without_masked(sample, advantages, returns)
        # A masked sample has no last token: its reward is in the last column.
        sample.info["return"] = every_reward[rows].sum(dim=-1)
        sample.kl = None


def _rewarded_rollout(
    samples: Sequence[Experience], config: PPOConfig, *, kl_weight: float, greedy: Sequence[Experience]
) -> RewardedRollout:
    """Return the estimator's input: the rewards by groups, in double precision, and the tokens of all samples."""
    size, settings = config.rollout.n_samples_per_prompt, config.algo.advantage
    check_groups(samples, size=size)
    places = torch.tensor([place for sample in samples for place in sample.index])
    rewards = torch.cat([sample.rewards for sample in samples]).double()
    masked = torch.cat([_masked(sample) for sample in samples])
    shape_rewards(greedy, config)
    tokens = RewardedPass(
        places=places.tolist(),
        mask=_stacked([sample.action_mask for sample in samples]) * ~masked[:, None],
        kl=_stacked([sample.kl for sample in samples]),
        values=None if samples[0].values is None else _stacked([sample.values for sample in samples]),
    )
    return RewardedRollout(
        rewards=torch.empty_like(rewards).index_put((places,), rewards).view(-1, size),
        counted=torch.empty_like(masked).index_put((places,), ~masked).view(-1, size) if masked.any() else None,
        passes=[tokens],
        kl_coef=kl_weight,
        gamma=settings.gamma,
        lambd=settings.lambd,
        divide=not settings.no_std_norm,
        greedy=torch.stack([sample.rewards for sample in greedy]).double() if greedy else None,
        pass_k=settings.pass_k,
    )


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all parts (B, A) in one tensor, with zeros after the shorter ones."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])


def _check_finite(experience: Experience, values: torch.Tensor, *, what: str, locations: Sequence[str]) -> None:
    """Raise UserError if one of the values (B,) of a pass's samples is not finite."""
    for place, value in zip(experience.index, values.tolist(), strict=True):
        if not math.isfinite(value):
            where = f"{locations[place]}: " if locations else f"sample {place} of the rollout: "
            source = REWARD_SOURCES if what == "reward" else ADVANTAGE_SOURCES
            raise UserError(f"{where}the {what} of a response is {value}, which cannot be trained on; {source}")


def _means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return each sample's mean over its loss tokens (B,), of values and mask (B, A); 0 for one that has none."""
    return (values * mask).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def _masked(experience: Experience) -> torch.Tensor:
    """Return which of the B samples of a pass are not trained on, (B,)."""
    noted = experience.info.get("masked")
    return torch.zeros(len(experience.index), dtype=torch.bool) if noted is None else noted.bool()


def _without_masked(
    experience: Experience, advantages: torch.Tensor, returns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns (B, A) that teach neither policy nor critic anything of masked samples."""
    masked = _masked(experience)[:, None]
    kept = returns if experience.values is None else torch.where(masked, experience.values, returns)
    return torch.where(masked, 0.0, advantages), kept


def check_groups(experiences: Sequence[Experience], *, size: int) -> None:
    """Assert that the samples of a rollout are whole groups in order: `size` samples of one prompt after the other."""
    places = [place for experience in experiences for place in experience.index]
    assert sorted(places) == list(range(len(places))), "every sample of the rollout is there once"
    assert len(places) % size == 0, f"{len(places)} samples are no groups of {size}"
    if size == 1:
        return
    identities = [
        (prompt, label, media_before(media, 1))
        for experience in experiences
        for prompt, label, media in zip(experience.prompts, experience.labels, experience.mm_train_inputs, strict=True)
    ]
    by_place = dict(zip(places, identities, strict=True))
    for start in range(0, len(places), size):
        count = len({by_place[place] for place in range(start, start + size)})
        assert count == 1, f"samples {start} to {start + size - 1} of a rollout are of {count} prompts"


Key: TypeAlias = tuple[bytes, tuple[Hashable, ...]]


@dataclass(frozen=True, kw_only=True)
class _Started:
    """Passes that the workers have been given."""

    samples: list[list[Experience]]
    refs: list[ray.ObjectRef]


class ReferenceAhead:
    """The reference's passes over one rollout, which run while the engines generate its other groups."""

    def __init__(self, group: RayActorGroup, *, limits: PassLimits, gpus_per_pass: int = 1) -> None:
        """Args:
        limits: of a pass that computes nothing else at the same time.
        gpus_per_pass: GPUs that share a pass.
        """
        tokens = AHEAD_TOKENS * gpus_per_pass
        self._limits = replace(limits, tokens=tokens if limits.tokens is None else min(tokens, limits.tokens))
        self._group = group
        self._ranks = data_parallel_size(group)
        self._waiting: list[Experience] = []
        self._started: list[_Started] = []
        # Keys of the whole rollout's samples, in order.
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
        """Start the passes over the samples of the whole rollout that have none yet."""
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

    def log_probs(self) -> list[torch.Tensor]:
        """Return the log-probs of the samples that `finish` was given, (1, A) each."""
        known: dict[Key, torch.Tensor] = {}
        for started in self._started:
            for batch, rows in zip(started.samples, _collected(started.refs, self._group), strict=True):
                known |= {_key(one): row[: one.sequences.numel() - 1] for one, row in zip(batch, rows, strict=True)}
        return [known[key][None] for key in self._keys]

    def _start(self, samples: Sequence[Experience]) -> None:
        plan = forward_plan(samples, ranks=self._ranks, limits=self._limits)
        batches = [[samples[place] for place in batch] for batch in plan]
        passes = [pass_of(batch) for batch in batches]
        masks = [one.action_mask for one in passes]
        refs = self._group.async_run_method_batch(method_name="forward", action_mask=masks, **model_inputs(passes))
        self._started.append(_Started(samples=batches, refs=refs))


def _key(sample: Experience) -> Key:
    """Return what log-probs depend on: the tokens (1, T) and the media of a sample."""
    return sample.sequences.numpy().tobytes(), media_before(sample.mm_train_inputs[0], sample.sequences.numel())
