"""The loop of a run: rollouts, experiences, passes, records."""

from helpers.upstream_names.seam import Seam

SEAMS: tuple[Seam, ...] = (
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
        upstream="openrlhf.trainer.ppo_utils.experience:Experience.concat_experiences",
        how="used",
        ours="lmm_r1.rl.batching:forward_passes",
        reason="samples become a pass of the rollout's models",
        signature="experiences_list pad_token_id",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:split_experience_batch",
        how="used",
        ours="lmm_r1.rl.batching:update_passes",
        reason="passes of the rollout's models become samples again",
        signature="experience",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:remove_padding_in_sequences",
        how="used",
        ours="lmm_r1.rl.batching:update_passes",
        reason="what is counted and sent has no padding",
        signature="items",
    ),
    Seam(
        upstream="openrlhf.trainer.ppo_utils.experience:make_experience_batch",
        how="used",
        ours="lmm_r1.rl.batching:update_passes",
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
