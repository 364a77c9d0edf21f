"""From rollouts to what the models train on: their passes over the samples, then the passes of the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig
from lmm_r1.data.sample import Sample, media_before
from lmm_r1.errors import UserError
from lmm_r1.host.openrlhf import (
    Experience,
    apply_length_penalties,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from lmm_r1.host.openrlhf_models import compute_approx_kl
from lmm_r1.host.openrlhf_workers import RayActorGroup, RemoteExperienceMaker
from lmm_r1.rl.advantages import ESTIMATORS, RewardedPass, RewardedRollout, group_deviations
from lmm_r1.rl.batching import (
    PassLimits,
    data_parallel_size,
    pass_limits,
    plan_forward,
    plan_update,
    prompt_tokens,
    sample_sizes,
)
from lmm_r1.rl.mismatch import Mismatch
from lmm_r1.rl.reference_ahead import ReferenceAhead
from lmm_r1.rl.rollouts import Rollout, experience_of
from lmm_r1.rl.workers import model_inputs

# What a rollout takes at least: what samples of a group begin with once.
WITHOUT_REPEATS = PassLimits(samples=None, tokens=None, share_prefix=True)
REWARD_SOURCES = "check what --reward.remote_url or --reward.model_name_or_path gives for it"
ADVANTAGE_SOURCES = (
    "its reward is finite, so look at the log-probs of policy and reference model, of which the KL in the reward is "
    "made, and at the critic's values"
)


@dataclass(frozen=True, kw_only=True)
class UpdatePasses:
    """The passes of the optimizer steps on one rollout."""

    steps: list[list[Experience]]
    """For each optimizer step the passes of all ranks, those of one rank in a row; every rank has as many."""
    unique_tokens: int
    """How many tokens the steps would compute if each computed once what samples of a group begin with."""


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """What the models say of a rollout, one tensor per pass; None of a model that is not asked."""

    rewards: list[torch.Tensor] | None
    """(B,) each; those of the others (B, A)."""
    log_probs: list[torch.Tensor] | None
    values: list[torch.Tensor] | None
    reference_log_probs: list[torch.Tensor] | None


class KitExperienceMaker(RemoteExperienceMaker):
    """OpenRLHF's experience maker; passes are cut by groups, and every model gets the media."""

    def __init__(self, config: PPOConfig, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.config = config
        # Whether the models compute once what a group's samples begin with: they say so when they are loaded.
        self.share_prefix = False
        self.is_on_policy = is_on_policy(config)
        # Where the prompt of each sample of the rollout at hand stands, for errors.
        self.locations: Sequence[str] = ()
        # The greedy response to each of its prompts, where the estimator compares with one.
        self.greedy: Sequence[Sample] = ()
        # What the reference has computed of it already, where it runs during generation.
        self.ahead: ReferenceAhead | None = None
        self.mismatch = Mismatch(config)

    def reference_ahead(self) -> ReferenceAhead | None:
        """Return what computes the reference's log-probs of a new rollout while it is generated; None where nothing does."""
        if not self.config.ref.during_generation:
            return None
        assert self.initial_model_group is not None, "refused by config.checks"
        return ReferenceAhead(
            self.initial_model_group,
            limits=pass_limits(self.config, self.config.rollout, share_prefix=self.share_prefix),
            pad_token_id=self.tokenizer.pad_token_id,
            gpus_per_pass=self.initial_model_group.duplicate_actors,
        )

    def begin(self, rollout: Rollout) -> None:
        """Take what belongs to the rollout at hand beside its samples."""
        self.locations, self.greedy, self.ahead = rollout.locations, rollout.greedy, rollout.ahead

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Return the passes of all ranks, those of one rank in a row; every rank has as many."""
        if self.ahead is not None:
            self.ahead.finish(rollout_samples)
        for index, sample in enumerate(rollout_samples):
            sample.index = [index]
        limits = pass_limits(self.config, self.config.rollout, share_prefix=self.share_prefix)
        plan = plan_forward(sample_sizes(rollout_samples), ranks=self._ranks(), limits=limits)
        return [
            Experience.concat_experiences([rollout_samples[index] for index in batch], self.tokenizer.pad_token_id)
            for rank in plan
            for batch in rank
        ]

    def update_passes(self, experiences: list[Experience], *, step: int) -> UpdatePasses:
        """Return the passes of every optimizer step.

        Which samples make up an optimizer step depends on the seed and the step alone, and not on how many ranks there
        are, or on how the samples were computed.
        """
        places = [index for experience in experiences for index in experience.index]
        parts = [part for experience in experiences for part in split_experience_batch(experience)]
        by_place = dict(zip(places, remove_padding_in_sequences(parts), strict=True))
        items = [_learnt_from(by_place[place]) for place in range(len(places))]
        sizes = sample_sizes(items)
        plan = plan_update(
            sizes,
            batch_size=self.config.train.batch_size,
            ranks=self._ranks(),
            limits=pass_limits(self.config, self.config.train, share_prefix=self.share_prefix),
            seed=f"{self.config.train.seed}-{step}",
        )
        steps = [
            [make_experience_batch([items[index] for index in batch]) for rank in ranks for batch in rank]
            for ranks in plan
        ]
        updated = [[sizes[index] for rank in ranks for batch in rank for index in batch] for ranks in plan]
        return UpdatePasses(steps=steps, unique_tokens=sum(map(WITHOUT_REPEATS.cost, updated)))

    @torch.no_grad()
    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """Run the rollout's models over the passes, and add what they say: rewards, log-probs, values and the KL."""
        outputs = self._run_models(samples_list)
        kl = self.config.algo.kl
        for place, experience in enumerate(samples_list):
            if outputs.rewards is not None:
                experience.rewards = experience.info["reward"] = outputs.rewards[place]
            if outputs.values is not None:
                experience.values = outputs.values[place]
            if outputs.log_probs is not None:
                experience.action_log_probs = outputs.log_probs[place]
            mask = experience.action_mask
            experience.kl = difference = torch.zeros_like(mask, dtype=torch.float)  # (B, A)
            if outputs.reference_log_probs is not None:
                reference = outputs.reference_log_probs[place]
                if kl.use_loss:
                    experience.base_action_log_probs = reference
                else:
                    policy = experience.action_log_probs
                    experience.kl = compute_approx_kl(policy, reference, kl_estimator=kl.estimator)
                    difference = policy.float() - reference.float()
            experience.info["kl"] = _means(experience.kl, mask)
            experience.info["logprobs_diff"] = _means(difference, mask)
        if outputs.log_probs is not None:
            self.mismatch.measure(samples_list)
        if self.is_on_policy:
            for experience in samples_list:
                experience.action_log_probs = None
        return samples_list

    def _run_models(self, passes: Sequence[Experience]) -> ModelOutputs:
        """Start the passes of each model, of those that share GPUs one after the other, and collect what they give."""
        train = self.args.train
        inputs = model_inputs(passes)
        masks = [experience.action_mask for experience in passes]
        with_reference = train.colocate_all or train.colocate_actor_ref
        # Its samples' media go with it.
        ahead, self.ahead = self.ahead, None
        if ahead is not None and with_reference:
            ahead.wait()
            ray.get(self.initial_model_group.async_run_method(method_name="empty_cache"))
        rewards = policy = values = reference = None
        if passes[0].rewards is None:
            padded = [True] * len(passes)
            rewards = self._dispatch_forward(
                self.reward_model_group, train.colocate_all, pad_sequence=padded, **inputs
            )
        if self.makes_policy_pass:
            policy = self._dispatch_forward(self.actor_model_group, with_reference, action_mask=masks, **inputs)
        if self.critic_model_group is not None:
            if train.colocate_critic_reward and rewards is not None:
                ray.get(rewards)
                ray.get(self.reward_model_group.async_run_method(method_name="empty_cache"))
            with_reward = train.colocate_all or train.colocate_critic_reward
            values = self._dispatch_forward(self.critic_model_group, with_reward, action_mask=masks, **inputs)
        if self.initial_model_group is not None and ahead is None:
            reference = self._dispatch_forward(self.initial_model_group, with_reference, action_mask=masks, **inputs)
        return ModelOutputs(
            rewards=_collected(rewards, self.reward_model_group),
            log_probs=_collected(policy, self.actor_model_group),
            values=_collected(values, self.critic_model_group),
            reference_log_probs=(
                _collected(reference, self.initial_model_group) if ahead is None else ahead.log_probs(passes)
            ),
        )

    @property
    def makes_policy_pass(self) -> bool:
        """Whether the policy's log-probs are computed before the update: in a first step to compare them with the engine's.

        Later steps that are learnt from once compare those of the update's own pass.
        """
        return not (self.is_on_policy and self.mismatch.checked)

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Add penalties to the rewards, and the advantages and returns of `--algo.advantage.estimator`.

        Raises UserError, before anything is learnt, where a reward or an advantage is no finite number.
        """
        for experience in experiences:
            experience.rewards = experience.rewards.to(torch.promote_types(experience.rewards.dtype, torch.float))
            self._check_finite(experience, experience.rewards, what="reward")
        apply_length_penalties(experiences, self.args)
        rollout = self._rewarded_rollout(experiences)
        if self.config.rollout.n_samples_per_prompt > 1:
            deviations = (
                group_deviations(rollout.rewards, rollout.counted).expand_as(rollout.rewards).flatten().float()
            )
            for experience in experiences:
                experience.info["group_reward_std"] = deviations[experience.index]
        estimate = ESTIMATORS[self.config.algo.advantage.estimator](rollout)
        parts = zip(experiences, estimate.token_rewards, estimate.advantages, estimate.returns, strict=True)
        for experience, rewards, advantages, returns in parts:
            # One that is not finite makes all of a whitened batch so; returns still tell whose it is.
            counted = torch.where(experience.action_mask.bool(), returns, 0.0)
            self._check_finite(experience, counted.sum(dim=-1), what="advantage")
            experience.advantages, experience.returns = _unlearnt(experience, advantages, returns)
            experience.info["return"] = rewards.sum(dim=-1)
            experience.kl = None
        return experiences

    def _rewarded_rollout(self, experiences: Sequence[Experience]) -> RewardedRollout:
        """Return what the estimator takes: the rewards by groups, in double precision, and the passes."""
        size, settings = self.config.rollout.n_samples_per_prompt, self.config.algo.advantage
        check_groups(experiences, size=size)
        places = torch.tensor([place for experience in experiences for place in experience.index])
        rewards = torch.cat([experience.rewards for experience in experiences]).double()
        masked = torch.cat([_masked(experience) for experience in experiences])
        passes = [
            RewardedPass(
                places=experience.index,
                mask=experience.action_mask * ~_masked(experience)[:, None],
                kl=experience.kl,
                values=experience.values,
            )
            for experience in experiences
        ]
        return RewardedRollout(
            rewards=torch.empty_like(rewards).index_put((places,), rewards).view(-1, size),
            counted=torch.empty_like(masked).index_put((places,), ~masked).view(-1, size) if masked.any() else None,
            passes=passes,
            kl_coef=self.kl_ctl.value,
            clip_range=self.config.reward.clip_range,
            gamma=settings.gamma,
            lambd=settings.lambd,
            divide=not settings.no_std_norm,
            greedy=self._greedy_rewards(),
            pass_k=settings.pass_k,
        )

    def _greedy_rewards(self) -> torch.Tensor | None:
        """Return the reward of the greedy response to each prompt, (G, 1), with the penalties that samples get."""
        if not self.greedy:
            return None
        experiences = [experience_of(sample, max_len=self.config.data.max_len) for sample in self.greedy]
        apply_length_penalties(experiences, self.args)
        return torch.stack([experience.rewards for experience in experiences]).double()

    def _check_finite(self, experience: Experience, values: torch.Tensor, *, what: str) -> None:
        """Raise UserError where one of the values (B,) of a pass's samples is not finite."""
        for place, value in zip(experience.index, values.tolist(), strict=True):
            if not math.isfinite(value):
                where = f"{self.locations[place]}: " if self.locations else f"sample {place} of the rollout: "
                source = REWARD_SOURCES if what == "reward" else ADVANTAGE_SOURCES
                raise UserError(f"{where}the {what} of a response is {value}, and no number to learn from; {source}")

    def _dispatch_forward(self, group: RayActorGroup, sync_condition: bool, **kwargs: Any) -> list[ray.ObjectRef]:
        """Start one model's passes; where there is no CUDA, wait for them: two models at a time share the cores badly."""
        refs = super()._dispatch_forward(group, sync_condition, **kwargs)
        if not cpu.has_cuda():
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
        return refs

    def _ranks(self) -> int:
        """Return into how many shares the samples are cut, so that each group of workers can take equal numbers."""
        groups = (self.actor_model_group, self.critic_model_group, self.initial_model_group, self.reward_model_group)
        return math.lcm(*(data_parallel_size(group) for group in groups if group is not None))


def _means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return each sample's mean over its loss tokens (B,), of values and mask (B, A); 0 for one that has none."""
    return (values * mask).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def _masked(experience: Experience) -> torch.Tensor:
    """Return which of the B samples of a pass nothing is learnt from, (B,)."""
    noted = experience.info.get("masked")
    return torch.zeros(len(experience.index), dtype=torch.bool) if noted is None else noted.bool()


def _unlearnt(
    experience: Experience, advantages: torch.Tensor, returns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns (B, A) of which masked samples teach policy and critic nothing."""
    masked = _masked(experience)[:, None]
    kept = returns if experience.values is None else torch.where(masked, experience.values, returns)
    return torch.where(masked, 0.0, advantages), kept


def _learnt_from(sample: Experience) -> Experience:
    """Return what an update takes of a sample without padding: of a masked one its prompt alone.

    No loss then counts it, nor divides by it, by its tokens or as a sample: sum_i M_i A_i L_i / sum_i M_i (Mini-o3,
    arXiv:2509.07969), nor do entropy and KL. Its prompt, which its group computes anyway, takes no pass any longer.
    """
    prompt = prompt_tokens(sample)
    if not sample.info.get("masked") or prompt == len(sample.sequences):
        return sample
    cut: dict[str, Any] = {}
    for name, value in vars(sample).items():
        if isinstance(value, torch.Tensor) and Experience.is_step_tensor_field(name):
            cut[name] = value[: prompt if len(value) == len(sample.sequences) else prompt - 1]
    (media,) = sample.mm_train_inputs
    kept = tuple(item for item in media if item.start < prompt) if media else ()
    return replace(sample, **cut, mm_train_inputs=[kept or None])


def check_groups(experiences: Sequence[Experience], *, size: int) -> None:
    """Assert that the samples of a rollout are whole groups in order: `size` of one prompt behind one another."""
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


def is_on_policy(config: PPOConfig) -> bool:
    """Say whether a rollout is learnt from in one optimizer step, in whose own pass the policy is still the old one.

    Then no pass of its own is made for the old log-probs, unless rewards are made of them.
    """
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    in_reward = config.algo.kl.init_coef > 0 and not config.algo.kl.use_loss
    one_step = config.train.batch_size == samples and config.train.max_epochs == 1
    return one_step and not in_reward and config.ds.lora.dropout == 0


def _collected(refs: list[ray.ObjectRef] | None, group: RayActorGroup | None) -> list[torch.Tensor] | None:
    """Return one model's outputs, one per pass; workers that share samples give them once each."""
    if refs is None:
        return None
    assert group is not None, "its workers gave the references"
    return [output for part in ray.get(refs)[:: group.duplicate_actors] for output in part]
