"""The models of policy, reference, critic and reward model."""

from helpers.upstream_names.seam import Seam, replaced

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
_ACTOR_REASON = "loading, positions and media tensors depend on the architecture: the kit knows them"

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
    replaced(
        "openrlhf.trainer.ray.ppo_actor:Actor",
        signature=_ACTOR,
    ),
    replaced(
        "openrlhf.trainer.ray.launcher:Actor",
        signature=_ACTOR,
    ),
    replaced(
        "openrlhf.trainer.ray.ppo_critic:get_llm_for_sequence_regression",
        signature=_VALUE_MODEL,
    ),
    replaced(
        "openrlhf.trainer.ray.launcher:get_llm_for_sequence_regression",
        signature=_VALUE_MODEL,
    ),
)
