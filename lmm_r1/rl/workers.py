"""The Ray workers that hold the models of a run, and the passes that they train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig, checkpoint_folder
from lmm_r1.data.sample import SampleMedia, SentMedia
from lmm_r1.generation import media_store
from lmm_r1.generation.weight_sync import BroadcastChannel, Channel, SharedMemoryChannel, send_buckets, send_files
from lmm_r1.host import seams
from lmm_r1.host.models import DeepSpeedEngine
from lmm_r1.host.openrlhf import Experience, NaiveReplayBuffer, get_loss_batch_info
from lmm_r1.host.optimizer import LossScaling, loss_scaling
from lmm_r1.host.strategy import KitStrategy
from lmm_r1.host.workers import (
    ActorPPOTrainer,
    CriticModelActor,
    CriticPPOTrainer,
    PolicyModelActor,
    ReferenceModelActor,
    RewardModelActor,
)
from lmm_r1.lifecycle.publication import EMA_FOLDER, MovingAverage
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapters_off
from lmm_r1.models.image_features import FeatureCounts, share_features
from lmm_r1.models.loading import Role, rl_settings
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.rl.losses import LossSettings, PolicyLoss
from lmm_r1.rl.mismatch import Gaps, gaps_of, merged, modalities
from lmm_r1.rl.resume import load_reference, write_reference

# The weight of a pass without loss tokens in means over tokens.
NEXT_TO_NO_TOKENS = 1e-6


def load_processor(pretrain: str, model: Any, padding_side: str, strategy: KitStrategy, use_fast: bool = True) -> Any:
    """Return what is saved next to the weights: the kit's processor, or the tokenizer of a language model."""
    return Checkpoint(pretrain, trust_remote_code=strategy.config.train.trust_remote_code).processor


@dataclass(frozen=True, kw_only=True)
class PassMedia:
    """The media of a pass, sent to a worker as one object: Ray would pickle each item of a list by itself."""

    rows: Sequence[SentMedia]
    """One entry per sample."""


def model_inputs(passes: Sequence[Experience]) -> dict[str, Any]:
    """Return the inputs of passes for every model's workers, by the parameter names of their `forward`."""
    return {
        "sequences": [experience.sequences for experience in passes],
        "attention_mask": [experience.attention_mask for experience in passes],
        "mm_train_inputs_list": [PassMedia(rows=experience.mm_train_inputs) for experience in passes],
    }


def media_per_row(mm_train_inputs_list: PassMedia | Sequence[Any], device: Any) -> dict[str, list[SampleMedia]]:
    """Return the media of a micro-batch, one entry per row, as the keyword that `KitActor.forward` takes.

    References are fetched from Ray's object store: the tensors of a group once, for all of its rows.
    """
    if isinstance(mm_train_inputs_list, PassMedia):
        return {"media": media_store.fetched(mm_train_inputs_list.rows)}
    rows: list[SentMedia | SampleMedia] = []
    for item in mm_train_inputs_list:
        rows.extend(item if isinstance(item, list) else [item])
    return {"media": media_store.fetched(rows)}


def install_seams(config: PPOConfig, role: Role) -> None:
    """Put the names of `host.seams` in place in a model worker's process, on the cores that it is to work on."""
    if config.train.async_enable:
        cpu.take_cores("models")
    if ray.is_initialized():
        cluster = ray.get_runtime_context()
        share_features(f"{cluster.gcs_address} {cluster.get_job_id()}")
    seams.install(rl_settings(config, role))


class KitActorPPOTrainer(ActorPPOTrainer):
    """OpenRLHF's policy update on planned passes; without CUDA, the engines get the weights as files."""

    actor: KitActor

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.loss_settings = LossSettings.of(self.strategy.config)
        self.actor_loss_fn: Callable[..., Any] = partial(self._policy_loss, PolicyLoss(self.loss_settings))
        # Gaps of the passes since they were last taken, if the passes themselves give the old log-probs.
        self.gaps: Gaps = {}
        self.average: MovingAverage | None = None
        self._experience: Experience | None = None

    def training_step(
        self, experience: Experience, kl_ctl: float, step: int, loss_batch_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Make one pass of an optimizer step, and return its losses as means over its own tokens.

        The losses are computed as parts of the step's mean. OpenRLHF logs the mean over passes, weighted by tokens.
        """
        self.replay_buffer.announce_pass(self.actor.model, step=step)
        self._experience = experience
        rate = self.actor_scheduler.get_last_lr()[0]
        if loss_batch_info is None:
            loss_batch_info = get_loss_batch_info(
                self.strategy, experience.action_mask, replay_buffer=self.replay_buffer, step=step, dynamic_batch=True
            )
        loss_batch_info = self.loss_settings.mean_of_other_terms(**loss_batch_info)
        status = super().training_step(experience, kl_ctl, step, loss_batch_info)
        # Upstream reads the rate after the optimizer step, when it is already the next one's.
        status["metrics"]["actor_lr"] = rate
        # The step logs it as `truncated_rate`.
        status["metrics"].pop("truncated", None)
        self._experience = None
        if self.average is not None and self.replay_buffer.dynamic_optimizer_step[step]:
            # With fp16, an update that overflows is skipped.
            if self.actor.model.was_step_applied():
                self.average.update()
        if not status["num_action_tokens"]:
            # OpenRLHF divides by the number of tokens, which is 0 if all samples of a pass are masked.
            status["num_action_tokens"] = NEXT_TO_NO_TOKENS
            status["metrics"] |= {name: 0.0 for name, weight in status["weights"].items() if weight == "token"}
        data_parallel = self.strategy.ds_device_mesh["dp"].size()
        of_step = self.replay_buffer.dynamic_batch_num_tokens[step] / data_parallel
        parts = {"policy_loss", "entropy_loss"} | ({"kl"} if self.strategy.config.algo.kl.use_loss else set())
        for name in parts & status["metrics"].keys():
            status["metrics"][name] = status["metrics"][name] * of_step / max(status["num_action_tokens"], 1)
        return status

    def _policy_loss(
        self,
        loss: Callable[..., Any],
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor | None,
        *rest: Any,
        token_level_loss: bool = True,
        **settings: Any,
    ) -> Any:
        """Return the policy loss, which knows its mean by itself; measure the gap to the engine if this pass gives the old log-probs."""
        if old_log_probs is None:
            experience = self._experience
            assert experience is not None, "the loss is that of the pass in `training_step`"
            gaps = gaps_of(log_probs, experience.rollout_log_probs, experience.action_mask, modalities(experience))
            self.gaps = merged((self.gaps, gaps))
            # The policy is still the old one.
            old_log_probs = log_probs.detach()
        return loss(log_probs, old_log_probs, *rest, **settings)

    def _init_vllm_sync_group(self, backend: str) -> None:
        if cpu.has_cuda():
            super()._init_vllm_sync_group(backend)

    def broadcast_to_vllm(self) -> None:
        """Send the weights to all engines, then clear their caches of values computed with the old ones."""
        if not cpu.has_cuda():
            send_files(self.actor, self.vllm_engines)
        else:
            channel: Channel = (
                SharedMemoryChannel(self.vllm_engines)
                if self.use_cuda_ipc
                else BroadcastChannel(self.vllm_engines, self._broadcast)
            )
            send_buckets(self.actor, channel, split=self.strategy.config.ds.tensor_parallel_size > 1)
        if dist.get_rank() == 0:
            keep_images = not self.actor.trains_vision
            ray.get([engine.reset_caches.remote(keep_images=keep_images) for engine in self.vllm_engines])
        dist.barrier()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        """Send a buffer of rank 0 to all workers of the engines, through OpenRLHF's process group."""
        if self.strategy.config.vllm.sync_with_ray:
            from ray.util import collective

            collective.broadcast(buffer, 0, group_name=self._model_update_group)
        else:
            self._model_update_group.broadcast(buffer, src=0, stream=torch.cuda.current_stream())


def no_loss(**settings: Any) -> None:
    """Replace upstream's policy loss, which knows fewer settings: `KitActorPPOTrainer` makes its own."""


class KitPolicyActor(PolicyModelActor.__ray_metadata__.modified_class):
    """OpenRLHF's policy worker with the names of `host.seams` replaced."""

    def init_model_from_pretrained(
        self, strategy: KitStrategy, pretrain: str, max_steps: int | None = None, vllm_engines: list | None = None
    ) -> None:
        config = strategy.config
        install_seams(config, "policy")
        super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)
        if config.train.enable_ema:
            self._begin_average(beta=config.train.ema_beta)
        check_packing(self.actor, group=strategy.ring_attn_group, longest=config.data.max_len)
        if config.actor.aux_loss_coef:
            self.actor.balance_experts()

    def _begin_average(self, *, beta: float) -> None:
        """Begin a moving average with the loaded weights, or continue the one of their checkpoint."""
        average = MovingAverage(self.actor.model, beta=beta)
        if self.checkpoint_states:
            average.load(checkpoint_folder(self.strategy.config) / "_actor" / str(self.strategy.loaded_tag))
        self.strategy.write_beside = average.save
        self.trainer.average = average

    def save_model(self) -> None:
        """Write the policy to `--ckpt.output_dir`, and the moving average of its weights, if there is one."""
        super().save_model()
        self._save_average(Path(self.strategy.config.ckpt.output_dir))

    def _save_average(self, folder: Path) -> None:
        """Write the averaged weights as a model next to the policy's."""
        average = self.trainer.average
        if average is None:
            return
        sleeps = self.strategy.config.ds.enable_sleep
        if sleeps:
            self.reload_states()
        with average.in_weights():
            self.strategy.save_model(self.actor, self.tokenizer, str(folder / EMA_FOLDER))
        if sleeps:
            self.offload_states()

    def reference_forward(self, **inputs: Any) -> torch.Tensor:
        """Return the log-probs of a pass without the adapters: those of the model that the run started from."""
        with adapters_off(bare(self.actor.model)):
            return self.forward(**inputs)

    def write_reference(self, file: str) -> None:
        """Write the policy's weights to the file from which the reference loads them."""
        write_reference(self.actor, Path(file))

    def save_checkpoint(
        self,
        tag: str,
        client_states: dict[str, Any] | None = None,
        metric_value: float | None = None,
        metric_key: str | None = None,
    ) -> None:
        """Save the policy; `latest` names it once all models of the run are saved and `settle_checkpoint` is called."""
        with self.strategy.unsettled():
            super().save_checkpoint(tag, client_states, metric_value, metric_key)
        if self.save_hf_ckpt:
            self._save_average(checkpoint_folder(self.strategy.config) / f"{tag}_hf")

    def settle_checkpoint(self, tag: str) -> None:
        """Make the saved policy the newest checkpoint, and delete checkpoints beyond the limits."""
        settle(self, "_actor", tag)

    def shares_prefix(self) -> bool:
        """Say whether the loaded model computes the prompt of a group once."""
        return self.actor.packing_samples and self.actor.share_prefix

    def updates_made(self) -> int:
        """Return how many optimizer steps have changed the policy's weights; fp16 skips some."""
        return self.actor.model.global_steps - self.actor.model.skipped_steps

    def loss_scaling(self) -> LossScaling | None:
        """Return the state of the policy's loss scaling with fp16."""
        return loss_scaling(self.actor.model)

    def take_computed_tokens(self) -> int:
        """Return how many tokens the policy has computed since the last call, including padding and repeats."""
        tokens, self.actor.computed_tokens = self.actor.computed_tokens, 0
        return tokens

    def take_feature_counts(self) -> FeatureCounts:
        """Return how often the policy needed and computed image features since the last call."""
        return self.actor.take_feature_counts()

    def take_gaps(self) -> Gaps:
        """Return the gaps of the passes since the last call, if the passes gave the old log-probs."""
        gaps, self.trainer.gaps = self.trainer.gaps, {}
        return gaps


def settle(worker: Any, folder: str, tag: str) -> None:
    """Make a worker's saved model the newest in its folder, and delete checkpoints beyond the `--ckpt.max_*` limits."""
    config = worker.strategy.config
    if not config.ckpt.disable_ds:
        saved = str(checkpoint_folder(config) / folder)
        worker.strategy.settle_ckpt(saved, tag, config.ckpt.max_num, config.ckpt.max_mem)


class KitReferenceActor(ReferenceModelActor.__ray_metadata__.modified_class):
    """OpenRLHF's reference worker with the names of `host.seams` replaced."""

    def init_model_from_pretrained(self, strategy: KitStrategy, pretrain: str) -> None:
        install_seams(strategy.config, "reference")
        super().init_model_from_pretrained(strategy, pretrain)
        check_packing(self.model, group=strategy.ring_attn_group, longest=strategy.config.data.max_len)

    def load_reference(self, file: str) -> None:
        """Take the weights of a file that the policy wrote."""
        load_reference(self.model, Path(file))

    def take_feature_counts(self) -> FeatureCounts:
        """Return the counts of image features, as the policy's workers do."""
        return self.model.take_feature_counts()


PolicyWorker = ray.remote(num_gpus=1)(KitPolicyActor)
ReferenceWorker = ray.remote(num_gpus=1)(KitReferenceActor)


class GroupReplayBuffer(NaiveReplayBuffer):
    """OpenRLHF's replay buffer, whose items are passes.

    The passes of an optimizer step are consecutive and hold `--train.batch_size` samples over all ranks; the last step's
    may hold fewer.
    """

    def append(self, experience: Experience) -> None:
        """Add one forward and backward pass."""
        self.items.append(experience)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Experience:
        return self.items[index]

    def collate_fn(self, batch: Sequence[Experience]) -> Experience:
        """Return a copy of the one pass that the data loader takes, which the trainer moves to its device and adds to."""
        (one,) = batch
        return replace(one, info=dict(one.info))

    def announce_pass(self, engine: DeepSpeedEngine, *, step: int) -> None:
        """Tell DeepSpeed, before a pass, whether an optimizer step ends with it.

        OpenRLHF does not do this. With ZeRO 1 and 2, DeepSpeed 0.19.6 then drops the gradients of all passes but the last.
        """
        engine.set_gradient_accumulation_boundary(bool(self.dynamic_optimizer_step[step]))

    @torch.no_grad()
    def setup_dynamic_batch(self, strategy: KitStrategy) -> None:
        """Note which pass ends an optimizer step, and the tokens and samples of each step over all ranks."""
        dp_group = strategy.ds_device_mesh["dp"].get_group()
        batch_size = strategy.config.train.batch_size // dist.get_world_size(group=dp_group)
        # The data loader takes one pass at a time.
        self.sample_batch_size = 1
        tokens = [item.action_mask.sum(dim=-1).tolist() for item in self.items]
        ends = _ends(list(map(len, tokens)), batch_size=batch_size)
        self.dynamic_optimizer_step = list(map(int, ends))
        steps = [before - end for before, end in zip(accumulate(ends), ends, strict=True)]  # of each pass
        last = sum(map(len, tokens)) % batch_size or batch_size
        self.dynamic_sample_loss_scale = [
            len(counts) / (last if step == steps[-1] else batch_size)
            for counts, step in zip(tokens, steps, strict=True)
        ]
        totals = torch.zeros(sum(ends), 2, dtype=torch.long, device=torch.cuda.current_device())
        for step, counts in zip(steps, tokens, strict=True):
            totals[step] += totals.new_tensor([sum(counts), sum(count > 0 for count in counts)])
        dist.all_reduce(totals, group=dp_group)
        # In a step of masked samples only, all losses are 0 and are divided by these.
        totals.clamp_(min=1)
        self.dynamic_batch_num_tokens = totals[steps, 0].float().tolist()
        self.dynamic_global_batch_size = totals[steps, 1].float().tolist()


def _ends(sizes: Sequence[int], *, batch_size: int) -> list[bool]:
    """Return for each pass, by its number of samples, whether an optimizer step ends with it."""
    totals = list(accumulate(sizes))
    ends = [total % batch_size == 0 or total == totals[-1] for total in totals]
    assert sum(ends) == -(-totals[-1] // batch_size), "no pass is of two steps"
    return ends


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
        longest = strategy.config.data.max_len
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
        longest = strategy.config.data.max_len
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
