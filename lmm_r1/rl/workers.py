"""The Ray workers that hold the models of a run: they compute the passes of rollouts, and make the updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from lmm_r1 import cpu
from lmm_r1.config import PPOConfig, checkpoint_folder
from lmm_r1.config.ppo import ActorConfig, CriticConfig
from lmm_r1.generation import media_store
from lmm_r1.generation.weight_sync import (
    BroadcastChannel,
    Channel,
    SharedMemoryChannel,
    join_engines,
    send_buckets,
    send_files,
)
from lmm_r1.host.models import DeepSpeedEngine
from lmm_r1.host.optimizer import LossScaling, loss_scaling
from lmm_r1.host.strategy import KitStrategy
from lmm_r1.host.workers import BaseModelActor, offload_deepspeed_states, reload_deepspeed_states
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.actor import KitActor, KitModule, KitValueModel
from lmm_r1.models.adapters import adapters_off
from lmm_r1.models.image_features import FeatureCounts
from lmm_r1.models.loading import Role, rl_settings
from lmm_r1.models.packed.packing import stacked
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.rl.losses import PolicyLoss, PolicyPass, value_loss
from lmm_r1.rl.mismatch import Gaps, gaps_of, merged
from lmm_r1.rl.samples import Pass
from lmm_r1.train.publication import EMA_FOLDER, MovingAverage
from lmm_r1.train.update import Counts, Step, Terms, mean_of_steps, prepared, update


class ModelWorker(BaseModelActor):
    """A rank of one model: OpenRLHF's worker, whose model and update are ours."""

    role: Role
    model: Any
    """The policy or reference; of a critic or reward model DeepSpeed's engine."""

    @property
    def config(self) -> PPOConfig:
        return self.strategy.config

    @property
    def engine(self) -> DeepSpeedEngine:
        """DeepSpeed's engine."""
        return self.model.model if isinstance(self.model, KitActor) else self.model

    @property
    def kit_module(self) -> KitModule:
        """The model without DeepSpeed's engine around it."""
        return self.model if isinstance(self.model, KitActor) else self.model.module

    def _load(self, path: str, *, offload: bool = False) -> KitActor | KitValueModel:
        """Return the model of a checkpoint, before DeepSpeed has it.

        Args:
            offload: whether DeepSpeed keeps the weights of a model that is not trained in host memory.
        """
        config, trained = self.config, self.role in ("policy", "critic")
        settings = rl_settings(config, self.role)
        strategy = self.strategy
        ds_config = strategy.get_ds_train_config() if trained else strategy.get_ds_eval_config(offload=offload)
        model: KitActor | KitValueModel
        if self.role in ("policy", "reference"):
            temperature = config.rollout.temperature
            model = KitActor(path, settings, temperature=temperature, ban_media_tokens=True, ds_config=ds_config)
        else:
            model = KitValueModel(
                path,
                "critic" if self.role == "critic" else "reward",
                settings,
                value_head_prefix=config.ds.value_head_prefix,
                normalize_reward=config.reward.normalize_enable,
                ds_config=ds_config,
            )
        if offload:
            model._offload = True  # read by OpenRLHF's strategy
        return model

    def _check_packing(self) -> None:
        run = None if isinstance(self.model, KitActor) else self.model
        longest = self.config.data.max_len
        check_packing(self.kit_module, run=run, group=self.strategy.ring_attn_group, longest=longest)

    @torch.no_grad()
    def forward(self, passes: Sequence[Pass]) -> list[list[torch.Tensor]]:
        """Return what the model gives for each sample of passes: log-probs or values (A,), or a reward ()."""
        self.model.eval()
        found = []
        for one in passes:
            rows = self._run(one, **({"of_samples": True} if self.role == "reward" else {})).cpu()
            found.append(
                [row if row.dim() == 0 else row[: len(its.loss_mask)] for row, its in zip(rows, one, strict=True)]
            )
        return found

    def _run(self, samples: Pass, **settings: Any) -> Any:
        """Run the model on a pass.

        Args:
            settings: further arguments of its `forward`.
        """
        media = media_store.fetched([sample.media for sample in samples])
        given = [replace(sample, media=items) for sample, items in zip(samples, media, strict=True)]  # type: ignore[arg-type]
        return self.model(given, ring_attn_group=self.strategy.ring_attn_group, **settings)

    def take_feature_counts(self) -> FeatureCounts:
        """Return how often the model needed and computed image features since the last call."""
        return self.kit_module.take_feature_counts()


class TrainedWorker(ModelWorker):
    """A rank of a model that is updated and saved."""

    folder: str
    """Of its checkpoints, in `--ckpt.path`."""

    def _prepare(self, model: KitModule, settings: ActorConfig | CriticConfig, *, steps: int) -> None:
        """Put a model under DeepSpeed with its optimizer, and load the checkpoint that the run resumes from.

        Args:
            steps: over which the learning rate is scheduled.
        """
        config, strategy = self.config, self.strategy
        self.model = prepared(strategy, model, settings, checkpointing=config.actor, steps=steps)
        self.states: dict[str, Any] = {}
        if config.ckpt.load_enable and self._checkpoints.exists():
            _, self.states = strategy.load_ckpt(self.engine, str(self._checkpoints))
        if config.ds.enable_sleep:
            self.offload_states()

    @property
    def _checkpoints(self) -> Path:
        return checkpoint_folder(self.config) / self.folder

    def _fit(self, steps: Sequence[Sequence[Pass]], **losses: Any) -> list[Step]:
        """Make the optimizer steps on passes, `--train.max_epochs` times; `losses` are arguments of `update`."""
        self.empty_cache()
        self.model.train()
        made = []
        for passes in [*steps] * self.config.train.max_epochs:
            made.append(update(self.strategy, self.model, passes, **losses))
            self._after_step()
        self.empty_cache()
        return made

    def _after_step(self) -> None:
        """Do what follows an optimizer step."""

    def reload_states(self) -> None:
        """Bring DeepSpeed's states back to the GPU."""
        reload_deepspeed_states(self.engine)

    def offload_states(self) -> None:
        """Move DeepSpeed's states to host memory."""
        offload_deepspeed_states(self.engine)

    def save_checkpoint(
        self,
        tag: str,
        client_states: Mapping[str, Any] | None = None,
        metric_value: float | None = None,
        metric_key: str | None = None,
    ) -> None:
        """Save the model; `latest` names it once all models of the run are saved and `settle_checkpoint` is called."""
        ckpt = self.config.ckpt
        if ckpt.disable_ds:
            return
        with self.strategy.unsettled():
            self.strategy.save_ckpt(
                self.engine,
                str(self._checkpoints),
                tag,
                ckpt.max_num,
                ckpt.max_mem,
                dict(client_states or {}),
                metric_value=metric_value,
                metric_key=metric_key,
            )

    def settle_checkpoint(self, tag: str) -> None:
        """Make the saved model the newest checkpoint, and delete checkpoints beyond the `--ckpt.max_*` limits."""
        ckpt = self.config.ckpt
        if not ckpt.disable_ds:
            self.strategy.settle_ckpt(str(self._checkpoints), tag, ckpt.max_num, ckpt.max_mem)

    def updates_made(self) -> int:
        """Return how many optimizer steps have changed the weights; fp16 skips some."""
        return self.engine.global_steps - self.engine.skipped_steps

    def loss_scaling(self) -> LossScaling | None:
        """Return the state of loss scaling with fp16."""
        return loss_scaling(self.engine)


class KitPolicyActor(TrainedWorker):
    """A rank of the policy, which also sends its weights to the engines."""

    role = "policy"
    folder = "_actor"

    def init_model_from_pretrained(
        self, strategy: KitStrategy, pretrain: str, max_steps: int = 1, vllm_engines: Sequence[Any] | None = None
    ) -> None:
        """Load the policy; raises UserError if it cannot be used.

        Args:
            max_steps: optimizer steps of the run.
        """
        self._setup_distributed(strategy)
        config, self.vllm_engines = self.config, vllm_engines
        self.processor = Checkpoint(pretrain, trust_remote_code=config.train.trust_remote_code).processor
        self._prepare(self._load(pretrain), config.actor, steps=max_steps)
        self.loss = PolicyLoss.of(config)
        # Gaps of the passes since they were last taken, if the passes themselves give the old log-probs.
        self.gaps: Gaps = {}
        self.average: MovingAverage | None = None
        self.channel: Channel | None = None
        if vllm_engines is not None and cpu.has_cuda():
            if config.train.colocate_all and not config.train.async_enable:
                self.channel = SharedMemoryChannel(vllm_engines)
            else:
                broadcast = join_engines(vllm_engines, config) if dist.get_rank() == 0 else None
                self.channel = BroadcastChannel(vllm_engines, broadcast)
        dist.barrier()
        if config.train.enable_ema:
            self._begin_average(beta=config.train.ema_beta)
        self._check_packing()
        if config.actor.aux_loss_coef:
            self.model.balance_experts()

    def _begin_average(self, *, beta: float) -> None:
        """Begin a moving average with the loaded weights, or continue the one of their checkpoint."""
        self.average = average = MovingAverage(self.engine, beta=beta)
        if self.states:
            average.load(self._checkpoints / str(self.strategy.loaded_tag))
        self.strategy.write_beside = average.save

    def fit(self, steps: Sequence[Sequence[Pass]], kl_weight: float) -> dict[str, float]:
        """Update the policy on the passes of each optimizer step, and return the metrics.

        Args:
            kl_weight: of the KL to the reference in the loss.
        """

        def terms(samples: Pass) -> Terms:
            return self._terms(samples, kl_weight=kl_weight)

        aux_weight = self.config.actor.aux_loss_coef
        made = self._fit(steps, counts=self._counts, terms=terms, aux_weight=aux_weight, name="actor")
        means = mean_of_steps(made)
        del means["loss"]
        computed = sum(step.computed for step in made)
        return means | {
            "tokens/update_computed": computed,
            "actor_lr": made[-1].rate,
            "actor_grad_norm": made[-1].grad_norm,
        }

    def _counts(self, samples: Pass) -> Counts:
        mask = stacked(samples, lambda sample: sample.loss_mask)
        return Counts(units=self.loss.settings.units(mask), tokens=int(mask.sum()), samples=len(samples))

    def _terms(self, samples: Pass, *, kl_weight: float) -> Terms:
        """Run the policy on a pass, and return its losses."""
        log_probs, output = self._run(samples, return_output=True, return_entropy=self.loss.needs_entropy)
        if samples[0].log_probs is None:
            # The policy is still the old one.
            self.gaps = merged((self.gaps, gaps_of(samples, list(log_probs.detach().cpu()))))
        given = PolicyPass.of(
            samples, log_probs=log_probs, entropy=output.entropy if self.loss.needs_entropy else None
        )
        terms = self.loss(given, kl_weight=kl_weight)
        return replace(terms, aux_loss=output.aux_loss) if self.config.actor.aux_loss_coef else terms

    def _after_step(self) -> None:
        # With fp16, an update that overflows is skipped.
        if self.average is not None and self.engine.was_step_applied():
            self.average.update()

    def broadcast_to_vllm(self) -> None:
        """Send the weights to all engines, then clear their caches of values computed with the old ones."""
        engines = self.vllm_engines
        assert engines is not None, "a run has engines"
        if not cpu.has_cuda():
            send_files(self.model, engines)
        else:
            assert self.channel is not None, "made with the engines"
            send_buckets(self.model, self.channel, split=self.config.ds.tensor_parallel_size > 1)
        if dist.get_rank() == 0:
            keep_images = not self.model.trains_vision
            ray.get([engine.reset_caches.remote(keep_images=keep_images) for engine in engines])
        dist.barrier()

    @torch.no_grad()
    def reference_forward(self, passes: Sequence[Pass]) -> list[list[torch.Tensor]]:
        """Return the log-probs of passes without the adapters: those of the model that the run started from."""
        with adapters_off(bare(self.model.model)):
            return self.forward(passes)

    def save_model(self) -> None:
        """Write the policy to `--ckpt.output_dir`, and the moving average of its weights, if there is one."""
        folder = self.config.ckpt.output_dir
        self.strategy.save_model(self.model, self.processor, folder)
        self._save_average(Path(folder))

    def _save_average(self, folder: Path) -> None:
        """Write the averaged weights as a model next to the policy's."""
        if self.average is None:
            return
        sleeps = self.config.ds.enable_sleep
        if sleeps:
            self.reload_states()
        with self.average.in_weights():
            self.strategy.save_model(self.model, self.processor, str(folder / EMA_FOLDER))
        if sleeps:
            self.offload_states()

    def save_checkpoint(self, tag: str, *given: Any, **named: Any) -> None:
        """Save the policy, with `--ckpt.save_hf` also as a model."""
        super().save_checkpoint(tag, *given, **named)
        if self.config.ckpt.save_hf:
            folder = checkpoint_folder(self.config) / f"{tag}_hf"
            self.strategy.save_model(self.model, self.processor, str(folder))
            self._save_average(folder)
        dist.barrier()

    def get_checkpoint_states(self) -> dict[str, Any]:
        """Return what was saved with the loaded checkpoint; empty without one."""
        return self.states

    def shares_prefix(self) -> bool:
        """Say whether the loaded model computes the prompt of a group once."""
        return self.model.packing_samples and self.model.share_prefix

    def take_gaps(self) -> Gaps:
        """Return the gaps of the passes since the last call, if the passes gave the old log-probs."""
        gaps, self.gaps = self.gaps, {}
        return gaps


class KitCriticActor(TrainedWorker):
    """A rank of the critic."""

    role = "critic"
    folder = "_critic"

    def init_model_from_pretrained(self, strategy: KitStrategy, pretrain: str, max_steps: int) -> None:
        """Load the critic; raises UserError if it cannot be used.

        Args:
            max_steps: its optimizer steps in the run.
        """
        self._setup_distributed(strategy)
        self._prepare(self._load(pretrain), self.config.critic, steps=max_steps)
        self._check_packing()

    def fit(self, steps: Sequence[Sequence[Pass]]) -> dict[str, float]:
        """Update the critic on the passes of each optimizer step, and return the metrics."""
        made = self._fit(steps, counts=self._counts, terms=self._terms, name="critic")
        means = mean_of_steps(made)
        means["critic_loss"] = means.pop("loss")
        return means | {"critic_lr": made[-1].rate, "critic_grad_norm": made[-1].grad_norm}

    def _counts(self, samples: Pass) -> Counts:
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        return Counts(units=tokens, tokens=tokens, samples=len(samples))

    def _terms(self, samples: Pass) -> Terms:
        """Run the critic on a pass, and return its loss, a mean over tokens."""
        values = self._run(samples)
        old, returns, mask = (
            stacked(samples, part).to(values.device)
            for part in (lambda its: its.values, lambda its: its.returns, lambda its: its.loss_mask.long())
        )
        loss = value_loss(values, old, returns, mask, clip=self.config.critic.value_clip)
        return Terms(loss=loss, sums={"values": (values.detach() * mask).sum(), "returns": (returns * mask).sum()})

    def save_model(self) -> None:
        """Write the critic next to `--ckpt.output_dir`, with `--critic.save_value_network`."""
        critic = self.config.critic
        if critic.save_value_network:
            assert critic.model_name_or_path is not None, "a run with a critic names it"
            trusted = self.config.train.trust_remote_code
            processor = Checkpoint(critic.model_name_or_path, trust_remote_code=trusted).processor
            self.strategy.save_model(self.model, processor, f"{self.config.ckpt.output_dir}_critic")


class FrozenWorker(ModelWorker):
    """A rank of a model that is not trained."""

    def init_model_from_pretrained(self, strategy: KitStrategy, pretrain: str) -> None:
        """Load the model; raises UserError if it cannot be used."""
        self._setup_distributed(strategy)
        offload = self.config.ref.offload if self.role == "reference" else self.config.reward.offload
        self.model = strategy.prepare(self._load(pretrain, offload=bool(offload)))
        self.model.eval()
        self._check_packing()


class KitReferenceActor(FrozenWorker):
    """A rank of the reference."""

    role = "reference"


class KitRewardActor(FrozenWorker):
    """A rank of the reward model."""

    role = "reward"


PolicyWorker = ray.remote(num_gpus=1)(KitPolicyActor)
ReferenceWorker = ray.remote(num_gpus=1)(KitReferenceActor)
CriticWorker = ray.remote(num_gpus=1)(KitCriticActor)
RewardWorker = ray.remote(num_gpus=1)(KitRewardActor)
