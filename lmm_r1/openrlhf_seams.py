"""Every OpenRLHF name that this project subclasses, replaces or uses, why, and the signature it relies on.

A contract test compares the signatures with the installed OpenRLHF. Upstream code finds some names as globals of its
own modules; `install` puts ours in their place, in the worker processes that run that code.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Seam:
    upstream: str  # `module:name`, or `module:class.method`
    how: Literal["subclassed", "replaced", "used"]
    ours: str
    """`module:name` of what takes its place or builds on it."""
    reason: str
    signature: str
    """Parameter names of the callable or of the class's constructor, in order."""


_ACTOR = (
    "self pretrain_or_model attn_implementation param_dtype load_in_4bit lora_rank lora_alpha lora_dropout "
    "target_modules ds_config device_map packing_samples temperature use_liger_kernel freeze_visual_encoder "
    "experts_implementation kwargs"
)
_VALUE_MODEL = (
    "model_name_or_path model_type param_dtype load_in_4bit lora_rank lora_alpha target_modules lora_dropout "
    "normalize_reward attn_implementation ds_config init_value_head value_head_prefix device_map packing_samples "
    "experts_implementation kwargs"
)
_VALUE_REASON = "upstream knows plain language models alone, and computes no images"
_ACTOR_REASON = "loading, positions and media tensors depend on the architecture: the kit knows them"
_MERGE_REASON = "upstream joins media tensors along dimension 0 for every architecture; the kit joins them"

SEAMS: tuple[Seam, ...] = (
    Seam(
        upstream="openrlhf.models:Actor",
        how="subclassed",
        ours="lmm_r1.models.actor:KitActor",
        reason=_ACTOR_REASON,
        signature=_ACTOR,
    ),
    Seam(
        upstream="openrlhf.models:Actor.gradient_checkpointing_enable",
        how="subclassed",
        ours="lmm_r1.models.actor:KitActor.gradient_checkpointing_enable",
        reason="no gradient runs through a frozen vision tower, and LoRA's runs through the frozen layers",
        signature="self gradient_checkpointing_kwargs",
    ),
    Seam(
        upstream="openrlhf.models.utils:log_probs_from_logits",
        how="used",
        ours="lmm_r1.models.actor:KitActor.forward",
        reason="log-probs of one kernel for policy and reference, chunked to save memory",
        signature="logits labels temperature",
    ),
    Seam(
        upstream="openrlhf.models.utils:compute_entropy",
        how="used",
        ours="lmm_r1.models.actor:KitActor.forward",
        reason="the entropy that OpenRLHF's loss and logs take",
        signature="logits",
    ),
    Seam(
        upstream="openrlhf.models.utils:set_z3_leaf_modules",
        how="used",
        ours="lmm_r1.models.loading:load_model",
        reason="experts that a token does not reach must not stall ZeRO-3's prefetching",
        signature="model detect_hybrid",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:Actor",
        how="replaced",
        ours="lmm_r1.models.actor:KitActor",
        reason=_ACTOR_REASON,
        signature=_ACTOR,
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:Actor",
        how="replaced",
        ours="lmm_r1.models.actor:KitActor",
        reason=_ACTOR_REASON,
        signature=_ACTOR,
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:get_llm_for_sequence_regression",
        how="replaced",
        ours="lmm_r1.models.value_model:KitValueModel",
        reason=_VALUE_REASON,
        signature=_VALUE_MODEL,
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:get_llm_for_sequence_regression",
        how="replaced",
        ours="lmm_r1.models.value_model:KitValueModel",
        reason=_VALUE_REASON,
        signature=_VALUE_MODEL,
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:get_tokenizer",
        how="replaced",
        ours="lmm_r1.trainer.workers:load_processor",
        reason="what is saved beside a critic's weights is the kit's processor, too",
        signature="pretrain model padding_side strategy use_fast",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer",
        how="replaced",
        ours="lmm_r1.trainer.critic_workers:KitCriticPPOTrainer",
        reason="upstream hands a critic no media",
        signature=(
            "self strategy critic critic_optim critic_scheduler micro_train_batch_size buffer_limit buffer_cpu_offload "
            "value_clip dataloader_pin_memory kwargs"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer.training_step",
        how="subclassed",
        ours="lmm_r1.trainer.critic_workers:KitCriticPPOTrainer.training_step",
        reason="as above",
        signature="self experience step loss_batch_info",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticModelActor.init_model_from_pretrained",
        how="subclassed",
        ours="lmm_r1.trainer.critic_workers:KitCriticActor.init_model_from_pretrained",
        reason="the place where the replaced names are installed in the critic's process",
        signature="self strategy pretrain max_steps",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticModelActor.forward",
        how="subclassed",
        ours="lmm_r1.trainer.critic_workers:KitCriticActor.forward",
        reason="upstream hands a critic no media",
        signature="self sequences action_mask attention_mask packed_seq_lens",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticModelActor.save_checkpoint",
        how="used",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.fit",
        reason="the critic is saved with the policy before an error of the outside world ends a run",
        signature="self tag metric_value metric_key",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RewardModelActor.init_model_from_pretrained",
        how="subclassed",
        ours="lmm_r1.trainer.critic_workers:KitRewardActor.init_model_from_pretrained",
        reason="the place where the replaced names are installed in the reward model's process",
        signature="self strategy pretrain",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RewardModelActor.forward",
        how="subclassed",
        ours="lmm_r1.trainer.critic_workers:KitRewardActor.forward",
        reason="upstream hands a reward model no media",
        signature="self sequences attention_mask packed_seq_lens pad_sequence",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:get_tokenizer",
        how="replaced",
        ours="lmm_r1.trainer.workers:load_processor",
        reason="upstream runs a checkpoint's own code and takes every model with a vision_config for one family",
        signature="pretrain model padding_side strategy use_fast",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer",
        how="replaced",
        ours="lmm_r1.trainer.workers:KitActorPPOTrainer",
        reason="weights reach the engines without CUDA, and all of the engines' caches are reset",
        signature=(
            "self strategy actor ema_model actor_optim actor_scheduler ema_beta micro_train_batch_size buffer_limit "
            "buffer_cpu_offload eps_clip tokenizer dataloader_pin_memory vllm_engines kwargs"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.training_step",
        how="subclassed",
        ours="lmm_r1.trainer.workers:KitActorPPOTrainer.training_step",
        reason="DeepSpeed must know which pass ends an optimizer step; losses are logged per token",
        signature="self experience kl_ctl step loss_batch_info",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.broadcast_to_vllm",
        how="subclassed",
        ours="lmm_r1.trainer.workers:KitActorPPOTrainer.broadcast_to_vllm",
        reason="as above",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer._init_vllm_sync_group",
        how="subclassed",
        ours="lmm_r1.trainer.workers:KitActorPPOTrainer._init_vllm_sync_group",
        reason="there is no NCCL without CUDA",
        signature="self backend",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:merge_mm_train_inputs",
        how="replaced",
        ours="lmm_r1.trainer.workers:media_per_row",
        reason=_MERGE_REASON,
        signature="mm_train_inputs_list device",
    ),
    Seam(
        upstream="openrlhf.utils.vlm_utils:merge_mm_train_inputs",
        how="replaced",
        ours="lmm_r1.trainer.workers:media_per_row",
        reason=_MERGE_REASON,
        signature="mm_train_inputs_list device",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:PolicyModelActor.init_model_from_pretrained",
        how="subclassed",
        ours="lmm_r1.trainer.workers:KitPolicyActor.init_model_from_pretrained",
        reason="the place where the replaced names are installed in the policy's process",
        signature="self strategy pretrain max_steps vllm_engines",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:ReferenceModelActor.init_model_from_pretrained",
        how="subclassed",
        ours="lmm_r1.trainer.workers:KitReferenceActor.init_model_from_pretrained",
        reason="the place where the replaced names are installed in the reference model's process",
        signature="self strategy pretrain",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RayActorGroup",
        how="used",
        ours="lmm_r1.trainer.run:train",
        reason="placing and calling the model workers",
        signature=(
            "self num_nodes num_gpus_per_node ray_actor_type pg num_gpus_per_actor duplicate_actors resources "
            "num_resources_per_node"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RayActorGroup.async_run_method_batch",
        how="used",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer._hand_out",
        reason="passes go to the workers of a group in shares of equal length",
        signature="self method_name kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor",
        how="subclassed",
        ours="lmm_r1.rollout.engine_actor:KitRolloutActor",
        reason="a prompt and its images are encoded once per group, and rewards are never lost",
        signature="self args bundle_indices agent_func_path remote_rm_url mm_pad_token_ids kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor._configure_device_env",
        how="used",
        ours="lmm_r1.rollout.engine_actor:KitRolloutActor",
        reason="an engine in the actor's own process starts from the same environment as upstream's",
        signature="self backend bundle_indices num_gpus",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor._configure_vllm_env",
        how="used",
        ours="lmm_r1.rollout.engine_actor:KitRolloutActor",
        reason="as above",
        signature="self version vllm full_determinism",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:RolloutRayActor.get_num_unfinished_requests",
        how="used",
        ours="lmm_r1.trainer.samples:KitSamplesGenerator.generate",
        reason="the next group goes to the engine with the least to do",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_engine:batch_vllm_engine_call",
        how="used",
        ours="lmm_r1.trainer.samples:wake",
        reason="engines that share GPUs with the models sleep while those train",
        signature="engines method_name args rank_0_only kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.update_weight",
        how="used",
        ours="lmm_r1.rollout.engines:create_engines",
        reason="the engine's side of OpenRLHF's weight broadcast on GPUs",
        signature="self name dtype shape empty_cache",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.utils:get_bundle_indices",
        how="used",
        ours="lmm_r1.rollout.engines:create_engines",
        reason="engines over several GPUs are placed as OpenRLHF places them",
        signature="placement_group index length",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy",
        how="subclassed",
        ours="lmm_r1.trainer.strategy:KitStrategy",
        reason="process groups and the optimizer on a machine without CUDA",
        signature="self seed full_determinism max_norm micro_train_batch_size train_batch_size zero_stage args",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.get_ds_train_config",
        how="subclassed",
        ours="lmm_r1.trainer.strategy:KitStrategy.get_ds_train_config",
        reason="DeepSpeed's own Adam for CPUs would have to be compiled, and gathers weights before they are there",
        signature="self optim_dict max_norm",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.get_ds_eval_config",
        how="subclassed",
        ours="lmm_r1.trainer.strategy:KitStrategy.get_ds_eval_config",
        reason="as above, for a reference model's weights",
        signature="self offload",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy._ds_init_train_model",
        how="subclassed",
        ours="lmm_r1.trainer.strategy:KitStrategy._ds_init_train_model",
        reason="--adam.vision_lr is read where a model's settings come in",
        signature="self model cfg",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy._get_model_parameters",
        how="subclassed",
        ours="lmm_r1.trainer.strategy:KitStrategy._get_model_parameters",
        reason="the vision tower's parameters get groups of their own for --adam.vision_lr",
        signature="self model optim weight_decay",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.save_model",
        how="subclassed",
        ours="lmm_r1.trainer.strategy:KitStrategy.save_model",
        reason="upstream saves LoRA's adapters alone, which neither vLLM nor the next stage can start from",
        signature="self model tokenizer output_dir kwargs",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy._unwrap_model",
        how="used",
        ours="lmm_r1.trainer.strategy:KitStrategy.save_model",
        reason="a policy and a bare engine are saved by the same call",
        signature="self model",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.setup_distributed",
        how="subclassed",
        ours="lmm_r1.trainer.strategy:KitStrategy.setup_distributed",
        reason="upstream names cuda as the device of its mesh",
        signature="self timeout",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.setup_ring_attn",
        how="subclassed",
        ours="lmm_r1.trainer.strategy:KitStrategy.setup_ring_attn",
        reason="ranks share rows by Ulysses; upstream's ring attention needs flash-attn and knows causal masks alone",
        signature="self ds_device_mesh",
    ),
    Seam(
        upstream="openrlhf.models.ring_attn_utils:set_ring_attn_group",
        how="used",
        ours="lmm_r1.trainer.strategy:KitStrategy.setup_ring_attn",
        reason="where upstream's workers look up the group that a model's forward gets",
        signature="group",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed.deepspeed:init_device_mesh",
        how="replaced",
        ours="lmm_r1.cpu:prepare_training",
        reason="upstream names cuda as the device of its mesh; replaced only where there is no CUDA",
        signature="device_type mesh_shape mesh_dim_names backend_override",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer",
        how="subclassed",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer",
        reason="our loop, which records metrics and rollouts and can be resumed at any step",
        signature=(
            "self strategy actor_model_group critic_model_group reward_model_group reference_model_group vllm_engines "
            "tokenizer"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.train_step",
        how="subclassed",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.train_step",
        reason="the samples of an optimizer step are chosen and handed out by groups",
        signature="self rollout_samples global_step",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.ppo_train",
        how="subclassed",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.ppo_train",
        reason="without CUDA critic and policy are updated one after the other",
        signature="self global_steps",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.broadcast_to_vllm",
        how="used",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.train_step",
        reason="weight sync, with sleeping engines",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer._compute_rollout_stats",
        how="used",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.train_step",
        reason="metrics of the rollout under OpenRLHF's names",
        signature="self experiences",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.save_logs_and_checkpoints",
        how="used",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.fit",
        reason="DeepSpeed checkpoints; its wandb and TensorBoard are off, as a resumed run would start new ones",
        signature="self global_step logs_dict client_states",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:PolicyModelActor.get_checkpoint_states",
        how="used",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.fit",
        reason="the step and the data position that a run goes on from",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:PolicyModelActor.save_checkpoint",
        how="used",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.fit",
        reason="what was learnt is saved before an error of the outside world ends a run",
        signature="self tag client_states metric_value metric_key",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:Experience",
        how="used",
        ours="lmm_r1.trainer.samples:Rollout",
        reason="what OpenRLHF's training takes",
        signature=(
            "self sequences attention_mask action_mask action_log_probs base_action_log_probs rollout_log_probs values "
            "returns advantages kl rewards scores response_length truncated total_length index prompts labels images "
            "mm_train_inputs info"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker",
        how="subclassed",
        ours="lmm_r1.trainer.experience_maker:KitExperienceMaker",
        reason="passes are cut by groups, and every model gets the media",
        signature=(
            "self actor_model_group critic_model_group reward_model_group initial_model_group kl_controller strategy "
            "tokenizer kwargs"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.split_rollout_samples",
        how="subclassed",
        ours="lmm_r1.trainer.experience_maker:KitExperienceMaker.split_rollout_samples",
        reason="passes of whole groups, as many for every rank",
        signature="self rollout_samples",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.make_experience",
        how="subclassed",
        ours="lmm_r1.trainer.experience_maker:KitExperienceMaker.make_experience",
        reason="the media that all models are to get are known here",
        signature="self samples_list",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker._dispatch_forward",
        how="subclassed",
        ours="lmm_r1.trainer.experience_maker:KitExperienceMaker._dispatch_forward",
        reason="upstream gives media to two models, runs all at once, and makes passes that the update can spare",
        signature="self group sync_condition kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.make_experience_batch",
        how="used",
        ours="lmm_r1.trainer.ppo_trainer:KitPPOTrainer.train_step",
        reason="log-probs, values, KL, rewards and advantages of a rollout",
        signature="self rollout_samples",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:Experience.concat_experiences",
        how="used",
        ours="lmm_r1.trainer.experience_maker:KitExperienceMaker.split_rollout_samples",
        reason="samples become a pass of the rollout's models",
        signature="experiences_list pad_token_id",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:split_experience_batch",
        how="used",
        ours="lmm_r1.trainer.experience_maker:KitExperienceMaker.update_passes",
        reason="passes of the rollout's models become samples again",
        signature="experience",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:remove_padding_in_sequences",
        how="used",
        ours="lmm_r1.trainer.experience_maker:KitExperienceMaker.update_passes",
        reason="what is counted and sent has no padding",
        signature="items",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:make_experience_batch",
        how="used",
        ours="lmm_r1.trainer.experience_maker:KitExperienceMaker.update_passes",
        reason="samples become a pass of the update",
        signature="items packing_samples",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils:NaiveReplayBuffer",
        how="subclassed",
        ours="lmm_r1.trainer.replay_buffer:GroupReplayBuffer",
        reason="passes stay as they were planned over all ranks",
        signature="self sample_batch_size limit cpu_offload packing_samples dynamic_batch",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils:NaiveReplayBuffer.append",
        how="subclassed",
        ours="lmm_r1.trainer.replay_buffer:GroupReplayBuffer.append",
        reason="what is appended together is one pass",
        signature="self experience",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils:NaiveReplayBuffer.clear",
        how="subclassed",
        ours="lmm_r1.trainer.replay_buffer:GroupReplayBuffer.clear",
        reason="the passes go with their samples",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils:NaiveReplayBuffer.setup_dynamic_batch",
        how="subclassed",
        ours="lmm_r1.trainer.replay_buffer:GroupReplayBuffer.setup_dynamic_batch",
        reason="the plan says which pass ends an optimizer step",
        signature="self strategy",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:NaiveReplayBuffer",
        how="replaced",
        ours="lmm_r1.trainer.replay_buffer:GroupReplayBuffer",
        reason="as above",
        signature="self sample_batch_size limit cpu_offload packing_samples dynamic_batch",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:NaiveReplayBuffer",
        how="replaced",
        ours="lmm_r1.trainer.replay_buffer:GroupReplayBuffer",
        reason="as above",
        signature="self sample_batch_size limit cpu_offload packing_samples dynamic_batch",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.samples_generator:SamplesGenerator",
        how="subclassed",
        ours="lmm_r1.trainer.samples:KitSamplesGenerator",
        reason="one call per group, so that a prompt is encoded once and its media tensors travel once",
        signature="self strategy prompts_dataloader eval_dataloader tokenizer vllm_engines",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.samples_generator:SamplesGenerator._process_response_into_experience",
        how="used",
        ours="lmm_r1.trainer.samples:KitSamplesGenerator",
        reason="a response becomes OpenRLHF's Experience",
        signature="self response generate_kwargs",
    ),
)


def install(*, trust_remote_code: bool, share_prefix: bool, freeze_visual_encoder: bool) -> None:
    """Put our names in the place of those that upstream's worker code looks up; may be called again.

    Only in processes that hold models. `init_device_mesh` is left to `cpu.prepare_training`.

    Args:
        freeze_visual_encoder: of value models, which upstream hands on to the policy alone.
    """
    both = {"trust_remote_code": trust_remote_code, "share_prefix": share_prefix}
    models = {
        path: functools.partial(resolve(path), **both, **settings)
        for path, settings in (
            ("lmm_r1.models.actor:KitActor", {"ban_media_tokens": True}),
            ("lmm_r1.models.value_model:KitValueModel", {"freeze_visual_encoder": freeze_visual_encoder}),
        )
    }
    for seam in SEAMS:
        if seam.how != "replaced" or seam.ours.startswith("lmm_r1.cpu:"):
            continue
        module, name = seam.upstream.split(":")
        ours = models[seam.ours] if seam.ours in models else resolve(seam.ours)
        setattr(importlib.import_module(module), name, ours)


def resolve(path: str) -> Callable[..., Any]:
    """Return the object at `module:name` or `module:class.method`; a Ray actor class gives the class inside it."""
    module, _, names = path.partition(":")
    target: Any = importlib.import_module(module)
    for name in names.split("."):
        target = getattr(target, name)
        if hasattr(target, "__ray_metadata__"):
            target = target.__ray_metadata__.modified_class
    return target
