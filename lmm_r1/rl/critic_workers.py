"""The Ray workers that hold the critic and the reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch

from lmm_r1.host.openrlhf import Experience, get_loss_batch_info
from lmm_r1.host.openrlhf_workers import CriticModelActor, CriticPPOTrainer, RewardModelActor
from lmm_r1.host.optimizer import LossScaling, loss_scaling
from lmm_r1.host.strategy import KitStrategy
from lmm_r1.models.image_features import FeatureCounts
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.rl.workers import install_seams, media_per_row, settle


class KitCriticPPOTrainer(CriticPPOTrainer):
    """OpenRLHF's critic update on planned passes with media."""

    def training_step(
        self, experience: Experience, step: int, loss_batch_info: dict | None = None
    ) -> dict[str, float]:
        """Make one pass of an optimizer step and return its metrics; OpenRLHF logs their mean over passes.

        The loss is PPO's with clipped values (arXiv:1707.06347). Only the policy has a load-balancing loss of experts:
        classes with an output layer compute it.
        """
        self.replay_buffer.announce_pass(self.critic, step=step)
        self.critic.train()
        mask = experience.action_mask
        if loss_batch_info is None:
            loss_batch_info = get_loss_batch_info(
                self.strategy, mask, replay_buffer=self.replay_buffer, step=step, dynamic_batch=True
            )
        values, _ = self.critic(
            experience.sequences,
            action_mask=mask,
            attention_mask=experience.attention_mask,
            return_output=True,
            ring_attn_group=self.strategy.ring_attn_group,
            **media_per_row(experience.mm_train_inputs, experience.sequences.device),
        )
        loss = self.critic_loss_fn(values, experience.values, experience.returns, action_mask=mask, **loss_batch_info)
        self.strategy.backward(loss, self.critic, self.critic_optim)
        # Read the rate now: after the optimizer step, the scheduler has the next one.
        rate = self.critic_scheduler.get_last_lr()[0]
        if self.replay_buffer.dynamic_optimizer_step[step]:
            self.strategy.optimizer_step(self.critic_optim, self.critic, self.critic_scheduler, name="critic")
        status = {
            "critic_loss": loss.item(),
            "values": (values * mask).sum().item(),
            "critic_lr": rate,
            "critic_grad_norm": self.strategy.get_grad_norm(self.critic),
        }
        return status | self._parts_of_steps(experience, status, step=step)

    def _parts_of_steps(self, experience: Experience, status: dict[str, float], *, step: int) -> dict[str, float]:
        """Return the metrics scaled so that their mean over passes and ranks is a mean over optimizer steps or tokens."""
        buffer = self.replay_buffer
        passes = len(buffer) / sum(buffer.dynamic_optimizer_step)  # of one optimizer step
        loss_mask = experience.action_mask
        share = passes * self.strategy.ds_device_mesh["dp"].size() / buffer.dynamic_batch_num_tokens[step]
        return {
            "critic_loss": passes * status["critic_loss"],
            "critic_grad_norm": passes * status["critic_grad_norm"] * buffer.dynamic_optimizer_step[step],
            "values": share * status["values"],
            "returns": share * (experience.returns * loss_mask).sum().item(),
        }


class KitCriticActor(CriticModelActor.__ray_metadata__.modified_class):
    """OpenRLHF's critic worker with the names of `host.seams` replaced, and with media."""

    def init_model_from_pretrained(self, strategy: KitStrategy, pretrain: str, max_steps: int) -> None:
        install_seams(strategy.config, "critic")
        super().init_model_from_pretrained(strategy, pretrain, max_steps)
        longest = strategy.args.data.max_len
        check_packing(self.critic.module, run=self.critic, group=strategy.ring_attn_group, longest=longest)

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        packed_seq_lens: list[int] | None = None,
        mm_train_inputs_list: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """Return the values (B, A) of the response tokens."""
        device = torch.cuda.current_device()
        self.critic.eval()
        with torch.no_grad():
            values = self.critic(
                sequences.to(device),
                action_mask.to(device),
                attention_mask.to(device),
                ring_attn_group=self.strategy.ring_attn_group,
                **media_per_row(mm_train_inputs_list or (), device),
            )
        self.critic.train()
        return values.to("cpu")

    def save_checkpoint(self, tag: str, metric_value: float | None = None, metric_key: str | None = None) -> None:
        """Save the critic; `latest` names it once all models of the run are saved and `settle_checkpoint` is called."""
        with self.strategy.unsettled():
            super().save_checkpoint(tag, metric_value, metric_key)

    def updates_made(self) -> int:
        """Return how many optimizer steps have changed the critic's weights; fp16 skips some."""
        return self.critic.global_steps - self.critic.skipped_steps

    def take_feature_counts(self) -> FeatureCounts:
        """Return the counts of image features, as the policy's workers do."""
        return self.critic.module.take_feature_counts()

    def loss_scaling(self) -> LossScaling | None:
        """Return the state of the critic's loss scaling with fp16."""
        return loss_scaling(self.critic)

    def settle_checkpoint(self, tag: str) -> None:
        """Make the saved critic the newest checkpoint, and delete checkpoints beyond the limits."""
        settle(self, "_critic", tag)


class KitRewardActor(RewardModelActor.__ray_metadata__.modified_class):
    """OpenRLHF's reward worker with the names of `host.seams` replaced, and with media."""

    def init_model_from_pretrained(self, strategy: KitStrategy, pretrain: str) -> None:
        install_seams(strategy.config, "reward")
        super().init_model_from_pretrained(strategy, pretrain)
        longest = strategy.args.data.max_len
        check_packing(self.model.module, run=self.model, group=strategy.ring_attn_group, longest=longest)

    def forward(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        packed_seq_lens: list[int] | None = None,
        pad_sequence: bool = False,
        mm_train_inputs_list: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """Return the rewards (B,) of whole samples."""
        device = torch.cuda.current_device()
        with torch.no_grad():
            rewards = self.model(
                sequences.to(device),
                attention_mask=attention_mask.to(device),
                ring_attn_group=self.strategy.ring_attn_group,
                **media_per_row(mm_train_inputs_list or (), device),
            )
        return rewards.to("cpu")


CriticWorker = ray.remote(num_gpus=1)(KitCriticActor)
RewardWorker = ray.remote(num_gpus=1)(KitRewardActor)
