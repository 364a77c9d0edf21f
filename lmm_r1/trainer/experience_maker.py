"""From rollouts to what the models train on: their passes over the samples, then the passes of the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray.launcher import RayActorGroup

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig
from lmm_r1.trainer.micro_batches import PassLimits, SampleSize, plan_forward, plan_update
from lmm_r1.trainer.mismatch import Mismatch
from lmm_r1.trainer.workers import PassMedia

# What a rollout takes at least: every prompt once.
WITHOUT_REPEATS = PassLimits(samples=None, tokens=None, share_prefix=True)


@dataclass(frozen=True, kw_only=True)
class UpdatePasses:
    """The passes of the optimizer steps on one rollout."""

    steps: list[list[Experience]]
    """For each optimizer step the passes of all ranks, those of one rank in a row; every rank has as many."""
    unique_tokens: int
    """How many tokens the steps would compute if each computed every prompt once."""


class KitExperienceMaker(RemoteExperienceMaker):
    """OpenRLHF's experience maker; batches are cut by groups, and every model gets the media."""

    def __init__(self, config: PPOConfig, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.config = config
        # Whether the models compute a group's prompt once: they say so when they are loaded.
        self.share_prefix = False
        self.learns_once = learns_once(config)
        self.mismatch = Mismatch(config)
        self._media: list[PassMedia] = []

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Return the passes of all ranks, those of one rank in a row; every rank has as many."""
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
        items = [by_place[place] for place in range(len(places))]
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
        learnt = [[sizes[index] for rank in ranks for batch in rank for index in batch] for ranks in plan]
        return UpdatePasses(steps=steps, unique_tokens=sum(map(WITHOUT_REPEATS.cost, learnt)))

    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        self._media = [PassMedia(rows=samples.mm_train_inputs) for samples in samples_list]
        makes_policy_pass = self.makes_policy_pass
        experiences = super().make_experience(samples_list)
        if makes_policy_pass:
            self.mismatch.measure(experiences)
        if self.learns_once:
            for experience in experiences:
                experience.action_log_probs = None
        return experiences

    @property
    def makes_policy_pass(self) -> bool:
        """Whether the policy's log-probs are computed before the update: in a first step to compare them with the engine's.

        Later steps that are learnt from once compare those of the update's own pass.
        """
        return not (self.learns_once and self.mismatch.checked)

    def _dispatch_forward(self, group: RayActorGroup, sync_condition: bool, **kwargs: Any) -> list[ray.ObjectRef]:
        """Start one model's passes; where there is no CUDA, wait for them: two models at a time share the cores badly."""
        if group is self.actor_model_group and not self.makes_policy_pass:
            # Upstream asks for them; none of what it makes of them is used.
            nothing = [torch.zeros_like(mask, dtype=torch.float) for mask in kwargs["action_mask"]]
            return [ray.put(nothing)]
        refs = super()._dispatch_forward(group, sync_condition, **{**kwargs, "mm_train_inputs_list": self._media})
        if not cpu.has_cuda():
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
        return refs

    def _ranks(self) -> int:
        """Return into how many shares the samples are cut, so that each group of workers can take equal numbers."""
        groups = (self.actor_model_group, self.critic_model_group, self.initial_model_group, self.reward_model_group)
        return math.lcm(*(data_parallel_size(group) for group in groups if group is not None))


def learns_once(config: PPOConfig) -> bool:
    """Say whether a rollout is learnt from in one optimizer step, in whose own pass the policy is still the old one.

    Then no pass of its own is made for the old log-probs, unless rewards are made of them.
    """
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    in_reward = config.algo.kl.init_coef > 0 and not config.algo.kl.use_loss
    one_step = config.train.batch_size == samples and config.train.max_epochs == 1
    return one_step and not in_reward and config.ds.lora.dropout == 0


def data_parallel_size(group: RayActorGroup) -> int:
    """Return how many workers of a group get samples of their own."""
    return len(group._actor_handlers) // group.duplicate_actors


def pass_limits(config: PPOConfig, settings: Any, *, share_prefix: bool) -> PassLimits:
    """Return what one pass may hold by `--rollout.*` or `--train.*`; tokens count per group of GPUs that share a pass."""
    by_tokens = config.train.dynamic_batch_enable
    tokens = config.train.max_tokens_per_gpu if settings.max_tokens_per_gpu is None else settings.max_tokens_per_gpu
    gpus = config.ds.tensor_parallel_size * config.ds.ulysses_size
    return PassLimits(
        samples=None if by_tokens else settings.micro_batch_size,
        tokens=tokens * gpus if by_tokens or share_prefix else None,
        share_prefix=share_prefix,
    )


def sample_sizes(samples: Sequence[Experience]) -> list[SampleSize]:
    """Return what matters of experiences of one sample each, without padding; groups have prompt and media in common."""
    sizes = []
    for index, sample in enumerate(samples):
        token_ids, learnt = sample.sequences.flatten(), sample.action_mask.flatten()
        first = learnt.nonzero().flatten()[:1]
        # The action mask is about the token after each.
        prompt = int(first) + 1 if len(first) else len(token_ids)
        group = (token_ids[:prompt].numpy().tobytes(), id(sample.mm_train_inputs[0]))
        sizes.append(SampleSize(index=index, group=group, prompt=prompt, response=len(token_ids) - prompt))
    return sizes
