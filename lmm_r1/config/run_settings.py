"""Which settings decide what a run learns: a checkpoint is gone on from with these unchanged only."""

from lmm_r1 import dotted
from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.sft import SFTConfig

# What a run may be stopped and taken up with: how it is shown, kept, placed and cut into passes. A trailing dot stands
# for a whole group. Models and rows are compared by their content, not by these names.
_FREE = (
    "actor.gradient_checkpointing_enable",
    "actor.gradient_checkpointing_reentrant",
    "actor.model_name_or_path",
    "ckpt.",
    "critic.model_name_or_path",
    "critic.save_value_network",
    "data.dataloader_num_workers",
    "data.dataset",
    "data.prompt_dataset",
    "ds.attn_implementation",
    "ds.deepcompile",
    "ds.enable_sleep",
    "ds.experts_implementation",
    "ds.overlap_comm",
    "eval.",
    "local_rank",
    "logger.",
    "model.gradient_checkpointing_enable",
    "model.gradient_checkpointing_reentrant",
    "model.model_name_or_path",
    "ref.",
    "reward.deadline_s",
    "reward.model_name_or_path",
    "reward.num_gpus_per_node",
    "reward.num_nodes",
    "reward.offload",
    "reward.remote_url",
    "reward.timeout_s",
    "rollout.max_tokens_per_gpu",
    "rollout.micro_batch_size",
    "rollout.vllm_generate_batch_size",
    "train.colocate_actor_ref",
    "train.colocate_all",
    "train.colocate_critic_reward",
    "train.dynamic_batch_enable",
    "train.max_tokens_per_gpu",
    "train.micro_batch_size",
    "train.shared_prefix_enable",
    "train.trust_remote_code",
    "ds.packing_samples",
    "use_ms",
    "vllm.",
)


def settings_of_the_run(config: PPOConfig | SFTConfig) -> dict[str, object]:
    """Return by flag what decides what a run learns, as JSON would give it back."""
    return {flag: _plain(dotted.get(config, flag)) for flag in dotted.leaf_types(type(config)) if not is_free(flag)}


def is_free(flag: str) -> bool:
    """Say whether a stopped run may go on with another value of the flag."""
    return any(flag.startswith(free) if free.endswith(".") else flag == free for free in _FREE)


def _plain(value: object) -> object:
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value
