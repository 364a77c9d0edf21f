"""The Ray workers that hold the models, and what they do in a step."""

from helpers.upstream_names.seam import Seam, replaced

SEAMS: tuple[Seam, ...] = (
    replaced(
        "openrlhf.trainer.ray.ppo_critic:get_tokenizer",
        signature="pretrain model padding_side strategy use_fast",
    ),
    replaced(
        "openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer",
        signature=(
            "self strategy critic critic_optim critic_scheduler micro_train_batch_size buffer_limit buffer_cpu_offload "
            "value_clip dataloader_pin_memory kwargs"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer.training_step",
        how="subclassed",
        ours="lmm_r1.rl.critic_workers:KitCriticPPOTrainer.training_step",
        reason="upstream hands a critic no media",
        signature="self experience step loss_batch_info",
    ),
    Seam(
        upstream="openrlhf.utils.loss_utils:get_loss_batch_info",
        how="used",
        ours="lmm_r1.rl.critic_workers:KitCriticPPOTrainer.training_step",
        reason="the tokens and samples of an optimizer step, which the loss of each of its passes is divided by",
        signature="strategy loss_mask replay_buffer step dynamic_batch batch_num_tokens global_batch_size",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticModelActor.init_model_from_pretrained",
        how="subclassed",
        ours="lmm_r1.rl.critic_workers:KitCriticActor.init_model_from_pretrained",
        reason="the place where the replaced names are installed in the critic's process",
        signature="self strategy pretrain max_steps",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticModelActor.forward",
        how="subclassed",
        ours="lmm_r1.rl.critic_workers:KitCriticActor.forward",
        reason="upstream hands a critic no media",
        signature="self sequences action_mask attention_mask packed_seq_lens",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticModelActor.save_checkpoint",
        how="subclassed",
        ours="lmm_r1.rl.critic_workers:KitCriticActor.save_checkpoint",
        reason="an earlier checkpoint stays until the policy is saved, too",
        signature="self tag metric_value metric_key",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RewardModelActor.init_model_from_pretrained",
        how="subclassed",
        ours="lmm_r1.rl.critic_workers:KitRewardActor.init_model_from_pretrained",
        reason="the place where the replaced names are installed in the reward model's process",
        signature="self strategy pretrain",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RewardModelActor.forward",
        how="subclassed",
        ours="lmm_r1.rl.critic_workers:KitRewardActor.forward",
        reason="upstream hands a reward model no media",
        signature="self sequences attention_mask packed_seq_lens pad_sequence",
    ),
    replaced(
        "openrlhf.trainer.ray.ppo_actor:get_tokenizer",
        signature="pretrain model padding_side strategy use_fast",
    ),
    replaced(
        "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer",
        signature=(
            "self strategy actor ema_model actor_optim actor_scheduler ema_beta micro_train_batch_size buffer_limit "
            "buffer_cpu_offload eps_clip tokenizer dataloader_pin_memory vllm_engines kwargs"
        ),
    ),
    replaced(
        "openrlhf.trainer.ray.ppo_actor:PolicyLoss",
        signature=(
            "self clip_eps_low clip_eps_high dual_clip token_level_loss policy_loss_type is_correction_level "
            "is_correction_mode is_correction_gating is_correction_threshold"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.training_step",
        how="subclassed",
        ours="lmm_r1.rl.workers:KitActorPPOTrainer.training_step",
        reason="DeepSpeed must know which pass ends an optimizer step; losses are logged per token",
        signature="self experience kl_ctl step loss_batch_info",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.broadcast_to_vllm",
        how="subclassed",
        ours="lmm_r1.rl.workers:KitActorPPOTrainer.broadcast_to_vllm",
        reason="weights reach the engines in buckets, or without CUDA as files, and all of the engines' caches are reset",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer._init_vllm_sync_group",
        how="subclassed",
        ours="lmm_r1.rl.workers:KitActorPPOTrainer._init_vllm_sync_group",
        reason="there is no NCCL without CUDA",
        signature="self backend",
    ),
    replaced(
        "openrlhf.trainer.ray.ppo_actor:merge_mm_train_inputs",
        signature="mm_train_inputs_list device",
    ),
    replaced(
        "openrlhf.utils.vlm_utils:merge_mm_train_inputs",
        signature="mm_train_inputs_list device",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:PolicyModelActor.init_model_from_pretrained",
        how="subclassed",
        ours="lmm_r1.rl.workers:KitPolicyActor.init_model_from_pretrained",
        reason="the place where the replaced names are installed in the policy's process",
        signature="self strategy pretrain max_steps vllm_engines",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:ReferenceModelActor.init_model_from_pretrained",
        how="subclassed",
        ours="lmm_r1.rl.workers:KitReferenceActor.init_model_from_pretrained",
        reason="the place where the replaced names are installed in the reference model's process",
        signature="self strategy pretrain",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RayActorGroup",
        how="subclassed",
        ours="lmm_r1.cluster.placement:NodeSortedGroup",
        reason="calling the model workers, of which consecutive ranks are on one node",
        signature=(
            "self num_nodes num_gpus_per_node ray_actor_type pg num_gpus_per_actor duplicate_actors resources "
            "num_resources_per_node"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RayActorGroup._initiate_actors",
        how="subclassed",
        ours="lmm_r1.cluster.placement:NodeSortedGroup._initiate_actors",
        reason="upstream gives rank i the bundle i, on whichever node that is",
        signature="self pg num_gpus_per_actor",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.launcher:RayActorGroup.async_run_method_batch",
        how="used",
        ours="lmm_r1.rl.model_groups:hand_out",
        reason="passes go to the workers of a group in shares of equal length",
        signature="self method_name kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:PolicyModelActor.get_checkpoint_states",
        how="used",
        ours="lmm_r1.rl.resume:Checkpoints.loaded_states",
        reason="the step and the data position that a run goes on from",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ray.ppo_actor:PolicyModelActor.save_checkpoint",
        how="subclassed",
        ours="lmm_r1.rl.workers:KitPolicyActor.save_checkpoint",
        reason="an earlier checkpoint stays until the critic is saved, too",
        signature="self tag client_states metric_value metric_key",
    ),
    replaced(
        "openrlhf.trainer.ray.ppo_actor:NaiveReplayBuffer",
        signature="self sample_batch_size limit cpu_offload packing_samples dynamic_batch",
    ),
    replaced(
        "openrlhf.trainer.ray.ppo_critic:NaiveReplayBuffer",
        signature="self sample_batch_size limit cpu_offload packing_samples dynamic_batch",
    ),
    Seam(
        upstream="openrlhf.utils.distributed_util:torch_dist_barrier_and_cuda_sync",
        how="used",
        ours="lmm_r1.host.weight_sync:send_buckets",
        reason="ranks wait for one another, and for their GPUs, before memory that engines read is freed",
        signature="",
    ),
)
