"""The loop of a run: rollouts, experiences, passes, records."""

from helpers.upstream_names.seam import Seam

SEAMS: tuple[Seam, ...] = (
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer",
        how="subclassed",
        ours="lmm_r1.rl.loop:KitPPOTrainer",
        reason="our loop, which records metrics and rollouts and can be resumed at any step",
        signature=(
            "self strategy actor_model_group critic_model_group reward_model_group reference_model_group vllm_engines "
            "tokenizer"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.train_step",
        how="subclassed",
        ours="lmm_r1.rl.loop:KitPPOTrainer.train_step",
        reason="the samples of an optimizer step are chosen and handed out by groups",
        signature="self rollout_samples global_step",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.ppo_train",
        how="subclassed",
        ours="lmm_r1.rl.loop:KitPPOTrainer.ppo_train",
        reason="critic and policy are updated one after the other where they share GPUs, or have none",
        signature="self global_steps",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.broadcast_to_vllm",
        how="subclassed",
        ours="lmm_r1.rl.loop:KitPPOTrainer.broadcast_to_vllm",
        reason="weight sync, with sleeping engines; those that generate at that time end before, or are held up",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer._compute_rollout_stats",
        how="used",
        ours="lmm_r1.rl.loop:KitPPOTrainer.train_step",
        reason="metrics of the rollout under OpenRLHF's names",
        signature="self experiences",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.save_logs_and_checkpoints",
        how="subclassed",
        ours="lmm_r1.rl.loop:KitPPOTrainer.save_logs_and_checkpoints",
        reason=(
            "an earlier checkpoint goes once all models are saved; upstream's wandb and TensorBoard are off, as a "
            "resumed run would start new ones"
        ),
        signature="self global_step logs_dict client_states",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.save_best_checkpoint",
        how="subclassed",
        ours="lmm_r1.rl.loop:KitPPOTrainer.save_best_checkpoint",
        reason="the best checkpoint before goes once all models are saved",
        signature="self eval_metrics global_step client_states",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_trainer:BasePPOTrainer.restore_best_checkpoint_state",
        how="used",
        ours="lmm_r1.rl.loop:KitPPOTrainer.fit",
        reason="a resumed run knows its best evaluation",
        signature="self checkpoint_states",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:Experience",
        how="used",
        ours="lmm_r1.rl.rollouts:Rollout",
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
        ours="lmm_r1.rl.experiences:KitExperienceMaker",
        reason="passes are cut by groups, and every model gets the media",
        signature=(
            "self actor_model_group critic_model_group reward_model_group initial_model_group kl_controller strategy "
            "tokenizer kwargs"
        ),
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.split_rollout_samples",
        how="subclassed",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.split_rollout_samples",
        reason="passes of whole groups, as many for every rank",
        signature="self rollout_samples",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.make_experience",
        how="subclassed",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.make_experience",
        reason="every model gets the media, and the policy makes no pass that its update can spare",
        signature="self samples_list",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns",
        how="subclassed",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.compute_advantages_and_returns",
        reason="upstream divides rounding by rounding where rewards are equal, and takes any n samples for a group",
        signature="self experiences",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.length_penalty:apply_length_penalties",
        how="used",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.compute_advantages_and_returns",
        reason="penalties for long and for cut responses",
        signature="experiences args",
    ),
    Seam(
        upstream="openrlhf.models.utils:compute_approx_kl",
        how="used",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.make_experience",
        reason="the KL that is paid for with reward, by --algo.kl.estimator",
        signature="log_probs log_probs_base log_probs_old kl_estimator unbiased_gradient",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker._dispatch_forward",
        how="subclassed",
        ours="lmm_r1.rl.experiences:KitExperienceMaker._dispatch_forward",
        reason="without CUDA the models run one after the other",
        signature="self group sync_condition kwargs",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.make_experience_batch",
        how="used",
        ours="lmm_r1.rl.loop:KitPPOTrainer.train_step",
        reason="log-probs, values, KL, rewards and advantages of a rollout",
        signature="self rollout_samples",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:Experience.concat_experiences",
        how="used",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.split_rollout_samples",
        reason="samples become a pass of the rollout's models",
        signature="experiences_list pad_token_id",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:split_experience_batch",
        how="used",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.update_passes",
        reason="passes of the rollout's models become samples again",
        signature="experience",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:remove_padding_in_sequences",
        how="used",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.update_passes",
        reason="what is counted and sent has no padding",
        signature="items",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:make_experience_batch",
        how="used",
        ours="lmm_r1.rl.experiences:KitExperienceMaker.update_passes",
        reason="samples become a pass of the update",
        signature="items packing_samples",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils:NaiveReplayBuffer",
        how="subclassed",
        ours="lmm_r1.rl.workers:GroupReplayBuffer",
        reason="passes stay as they were planned over all ranks",
        signature="self sample_batch_size limit cpu_offload packing_samples dynamic_batch",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils:NaiveReplayBuffer.append",
        how="subclassed",
        ours="lmm_r1.rl.workers:GroupReplayBuffer.append",
        reason="what is appended together is one pass",
        signature="self experience",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils:NaiveReplayBuffer.clear",
        how="subclassed",
        ours="lmm_r1.rl.workers:GroupReplayBuffer.clear",
        reason="the passes go with their samples",
        signature="self",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils:NaiveReplayBuffer.setup_dynamic_batch",
        how="subclassed",
        ours="lmm_r1.rl.workers:GroupReplayBuffer.setup_dynamic_batch",
        reason="the plan says which pass ends an optimizer step",
        signature="self strategy",
    ),
)
