"""DeepSpeed's set-up: process groups, optimizer, saving."""

from helpers.upstream_names.seam import Seam, replaced

SEAMS: tuple[Seam, ...] = (
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy",
        reason="process groups and the optimizer on a machine without CUDA",
        signature="self seed full_determinism max_norm micro_train_batch_size train_batch_size zero_stage args",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.get_ds_train_config",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.get_ds_train_config",
        reason="DeepSpeed's own Adam for CPUs would have to be compiled, and gathers weights before they are there",
        signature="self optim_dict max_norm",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.get_ds_eval_config",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.get_ds_eval_config",
        reason="DeepSpeed gathers a reference model's weights before they are there",
        signature="self offload",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy._ds_init_train_model",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy._ds_init_train_model",
        reason="--adam.vision_lr is read where a model's settings come in; buffers stay; gradients add up in fp32",
        signature="self model cfg",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy._ds_init_eval_model",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy._ds_init_eval_model",
        reason="a model that is only run keeps its buffers as well",
        signature="self model",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy._get_model_parameters",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy._get_model_parameters",
        reason="weight decay follows shapes and modules, not names; --adam.vision_lr has groups of its own",
        signature="self model optim weight_decay",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.backward",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.backward",
        reason="the losses of an optimizer step's passes must be finite",
        signature="self loss model _optimizer kwargs",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.optimizer_step",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.optimizer_step",
        reason="DeepSpeed makes weights NaN, or skips the step without a word, where gradients are not finite",
        signature="self _optimizer model _scheduler name kwargs",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.save_model",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.save_model",
        reason="upstream saves LoRA's adapters alone, which neither vLLM nor the next stage can start from",
        signature="self model tokenizer output_dir kwargs",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.save_ckpt",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.save_ckpt",
        reason="upstream deletes before it saves, also what `latest` names, and writes into the final folder",
        signature="self model save_dir tag max_num max_mem client_state save_latest metric_value metric_key",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy._write_ckpt_metric",
        how="used",
        ours="lmm_r1.host.strategy:KitStrategy.save_ckpt",
        reason="the metric by which checkpoints are deleted stands where upstream keeps it",
        signature="self ckpt_dir metric_value metric_key",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.load_ckpt",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.load_ckpt",
        reason="upstream knows the file `latest` alone, and ends in an assertion where that is empty",
        signature=(
            "self model load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only"
        ),
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy._unwrap_model",
        how="used",
        ours="lmm_r1.host.strategy:KitStrategy.save_model",
        reason="a policy and a bare engine are saved by the same call",
        signature="self model",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.setup_distributed",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.setup_distributed",
        reason="upstream names cuda as the device of its mesh",
        signature="self timeout",
    ),
    Seam(
        upstream="openrlhf.utils.deepspeed:DeepspeedStrategy.setup_ring_attn",
        how="subclassed",
        ours="lmm_r1.host.strategy:KitStrategy.setup_ring_attn",
        reason="ranks share rows by Ulysses; upstream's ring attention needs flash-attn and knows causal masks alone",
        signature="self ds_device_mesh",
    ),
    Seam(
        upstream="openrlhf.models.ring_attn_utils:set_ring_attn_group",
        how="used",
        ours="lmm_r1.host.strategy:KitStrategy.setup_ring_attn",
        reason="where upstream's workers look up the group that a model's forward gets",
        signature="group",
    ),
    replaced(
        "openrlhf.utils.deepspeed.deepspeed:init_device_mesh",
        signature="device_type mesh_shape mesh_dim_names backend_override",
    ),
)
