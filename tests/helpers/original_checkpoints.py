"""Settings of other projects as their repositories have them, with the flags that they become."""

from __future__ import annotations

from helpers.tables import table

# Flags that not every version has; where they are missing, notes say so.
# data.val_batch_size, what LoRA adapts, and what is shown of a validation.
EASYR1_LEFT_OUT = {"data.val_batch_size", "worker.actor.model.lora.target_modules", "trainer.val_generations_to_log"}
EASYR1_FLAGS = table("helpers/conversion_examples", "easyr1_flags")

GEO3K = "data.train_files=hiyouga/geometry3k@train data.val_files=hiyouga/geometry3k@test"
GEO3K_FLAGS = {"data.prompt_dataset": "hiyouga/geometry3k", "eval.dataset": "hiyouga/geometry3k"}


VL7B, VL3B = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"
BF16 = "worker.actor.fsdp.torch_dtype=bf16 worker.actor.optim.strategy=adamw_bf16"
ONE_ENGINE_PER_GPU = {"vllm.num_engines": 8, "vllm.tensor_parallel_size": 1}
# What each example script of EasyR1 gives beside the file, what that changes, and what is left out more.
NO_REFERENCE = dict.fromkeys(("ref.offload", "ref.num_nodes", "ref.num_gpus_per_node"))
EASYR1_SCRIPTS: dict[str, tuple[str, dict[str, object], set[str]]] = {
    "qwen2_5_7b_math_grpo": ("", {}, set()),
    "qwen2_5_vl_32b_geo3k_grpo": (
        f"{GEO3K} worker.actor.micro_batch_size_per_device_for_update=1 "
        f"worker.actor.micro_batch_size_per_device_for_experience=8 {BF16} worker.rollout.tensor_parallel_size=8 "
        "trainer.nnodes=2",
        GEO3K_FLAGS
        | {"rollout.micro_batch_size": 8, "rollout.max_tokens_per_gpu": 8 * 4096}
        | {"actor.num_nodes": 2, "ref.num_nodes": 2, "vllm.num_engines": 2, "vllm.tensor_parallel_size": 8},
        {"worker.actor.optim.strategy"},
    ),
    "qwen3_14b_dapo17k_dapo": (
        "data.max_prompt_length=2048 data.max_response_length=20480 data.mini_rollout_batch_size=1536 "
        "worker.actor.micro_batch_size_per_device_for_experience=8 worker.actor.optim.weight_decay=0.1 "
        "worker.actor.optim.lr_warmup_steps=10 worker.actor.global_batch_size=32 worker.actor.clip_ratio_high=0.28 "
        "worker.actor.clip_ratio_dual=10.0 worker.rollout.n=16 worker.rollout.max_num_batched_tokens=22528 "
        'worker.rollout.val_override_config={"n":16,"temperature":1.0,"top_p":0.7} '
        "worker.rollout.gpu_memory_utilization=0.8 "
        "worker.reward.reward_function=./examples/reward_function/dapo.py:compute_score "
        'worker.reward.reward_function_kwargs={"max_response_length":20480,"overlong_buffer_length":4096} '
        "algorithm.disable_kl=True algorithm.online_filtering=True algorithm.filter_key=accuracy_normalized "
        "trainer.total_epochs=10 trainer.max_try_make_batch=10",
        {
            "data.max_len": 22528,
            "rollout.max_new_tokens": 20480,
            "train.max_tokens_per_gpu": 22528,
            "rollout.micro_batch_size": 8,
            "rollout.max_tokens_per_gpu": 180224,  # 8 x 22528
            "rollout.n_samples_per_prompt": 16,
            "train.batch_size": 512,  # 32 x 16
            "actor.adam.weight_decay": 0.1,
            "actor.eps_clip_low_high": [0.2, 0.28],
            "actor.dual_clip": 10.0,
            "vllm.gpu_memory_utilization": 0.8,
            "eval.n_samples_per_prompt": 16,
            "eval.temperature": 1.0,
            "eval.top_p": 0.7,
            "reward.remote_url": "./examples/reward_function/dapo.py:compute_score",
            "reward.function_kwargs": '{"max_response_length": 20480, "overlong_buffer_length": 4096}',
            "algo.dynamic_filtering_part": "accuracy_normalized",
            "algo.dynamic_filtering_range": [0.01, 0.99],
            "algo.dynamic_filtering_max_batches": 30,  # 10 batches of 1536 prompts are 30 of 512
            "algo.kl.init_coef": 0.0,
            "algo.kl.use_loss": None,
            "algo.kl.estimator": None,
            "algo.dynamic_filtering_enable": True,
            "train.num_episodes": 10,
            **NO_REFERENCE,
        },
        {
            "data.mini_rollout_batch_size",
            "worker.actor.optim.lr_warmup_steps",
            "worker.rollout.max_num_batched_tokens",
        },
    ),
    "qwen2_5_vl_7b_geo3k_gspo": (
        f"{GEO3K} worker.actor.loss_type=gspo_token worker.actor.loss_avg_mode=seq worker.actor.clip_ratio_low=3e-4 "
        "worker.actor.clip_ratio_high=4e-4 algorithm.disable_kl=True",
        GEO3K_FLAGS
        | {"actor.policy_loss_type": "gspo_token", "actor.loss_agg_mode": "seq-mean-token-mean"}
        | {"actor.eps_clip_low_high": [3e-4, 4e-4]}
        | {"algo.kl.init_coef": 0.0, "algo.kl.use_loss": None, "algo.kl.estimator": None, **NO_REFERENCE},
        set(),
    ),
    "qwen2_5_vl_7b_geo3k_reinforce": (
        f"{GEO3K} algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_loss=false algorithm.kl_penalty=kl "
        "algorithm.kl_coef=1.0e-3",
        GEO3K_FLAGS
        | {"algo.advantage.estimator": "reinforce", "algo.kl.init_coef": 0.001}
        | {"algo.kl.use_loss": False, "algo.kl.estimator": "k1"},
        set(),
    ),
    "qwen3_4b_math_grpo_lora": (
        "worker.actor.model.lora.rank=64 worker.actor.model.lora.alpha=64 worker.actor.optim.lr=1e-5 "
        "worker.rollout.tensor_parallel_size=1 trainer.n_gpus_per_node=1",
        {
            "ds.lora.rank": 64,
            "ds.lora.alpha": 64,
            "ds.lora.target_modules": ["all-linear"],
            "actor.adam.lr": 1e-5,
            "actor.num_gpus_per_node": 1,
            "ref.num_gpus_per_node": 1,
            "vllm.num_engines": 1,
            "vllm.tensor_parallel_size": 1,
        },
        set(),
    ),
    "qwen2_5_vl_3b_geoqa8k_grpo": (
        "data.train_files=leonardPKU/GEOQA_8K_R1V@train data.val_files=leonardPKU/GEOQA_8K_R1V@test "
        "data.format_prompt=./examples/format_prompt/r1v.jinja worker.rollout.tensor_parallel_size=1 "
        "worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score",
        {
            "data.prompt_dataset": "leonardPKU/GEOQA_8K_R1V",
            "eval.dataset": "leonardPKU/GEOQA_8K_R1V",
            "data.prompt_template": "./examples/format_prompt/r1v.jinja",
            "reward.remote_url": "./examples/reward_function/r1v.py:compute_score",
            **ONE_ENGINE_PER_GPU,
        },
        set(),
    ),
}

LMM_R1_FLAGS = {
    "actor.model_name_or_path": VL3B,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.gradient_checkpointing_enable": True,
    "algo.advantage.gamma": 1,
    "algo.advantage.lambd": 1,
    "algo.kl.init_coef": 0.001,
    "ckpt.load_enable": True,
    "ckpt.save_hf": True,
    "ckpt.save_steps": 20,
    "actor.eps_clip": 0.2,  # their default
    "data.input_key": "message",
    "data.label_key": "answer",
    "data.max_len": 8192,  # 4096 + 4096
    "data.max_samples": 100000,
    "ds.zero_stage": 3,
    "ds.param_dtype": "bf16",
    "logger.trackers": ["wandb"],
    "logger.wandb.group": "lmm-r1-training",
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 8,
    "reward.remote_url": "http://127.0.0.1:5000/get_reward",
    "rollout.batch_size": 256,
    "rollout.n_samples_per_prompt": 16,
    "rollout.max_new_tokens": 4096,
    "rollout.temperature": 1.0,
    "rollout.micro_batch_size": 2,
    "train.batch_size": 256,
    "train.micro_batch_size": 2,
    "train.max_epochs": 1,
    "train.num_episodes": 2,
    "train.colocate_all": True,
    "vllm.num_engines": 8,
    "vllm.tensor_parallel_size": 1,
    "vllm.gpu_memory_utilization": 0.5,
    "vllm.enable_sleep": True,
    "vllm.enable_prefix_caching": True,
}
CLIPPED = {"critic.value_clip": 0.2}  # their default
CRITIC = {"critic.num_nodes": 1, "critic.num_gpus_per_node": 8, **CLIPPED}
FRE = {"actor.model_name_or_path": "./checkpoints/lmm-r1-fre-text"}
MORE_ROOM = {"rollout.max_new_tokens": 8192, "data.max_len": 12288}
ONE_AT_A_TIME = {"rollout.micro_batch_size": 1, "train.micro_batch_size": 1}
# What each stage of LMM-R1 is beside the common settings: rows, estimator, learning rate, folder, and the rest.
LMM_R1_SCRIPTS: dict[str, tuple[str, str, float, str, dict[str, object]]] = {
    "fre_text": ("deepscaler_message.jsonl", "reinforce_baseline", 4e-7, "/checkpoints/lmm-r1-fre-text", {}),
    "fre_multi": ("mathv60k_message.jsonl", "reinforce_baseline", 1e-6, "./checkpoints/lmm-r1-fre-multi", {}),
    "mgt_geo": ("mathv_geo_message.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-mgt-geo", FRE | CRITIC),
    "mgt_percereas": (
        *("mathv60k_message.jsonl", "reinforce_baseline", 4e-7, "./checkpoints/lmm-r1-mgt-percereas"),
        FRE | MORE_ROOM | ONE_AT_A_TIME | {"data.prompt_probs": "${PROMPT_DATA_PROBS}"},  # which it sets nowhere
    ),
    "direct_rl_geo": ("MathV360k/geo_split.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-direct-rl-geo", CRITIC),
    "sokoban": (
        *("sokoban.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-sokoban"),
        ONE_AT_A_TIME
        | NO_REFERENCE
        | {"rollout.batch_size": 128, "train.batch_size": 128, "train.num_episodes": 4, "ckpt.save_steps": 5}
        | {"rollout.max_new_tokens": 8196, "data.max_len": 12292, "algo.kl.init_coef": 0, "critic.adam.lr": 5e-6}
        | {"actor.freeze_visual_encoder": True, "data.label_key": None, "ckpt.load_enable": None}
        | {"logger.trackers": None, "logger.wandb.group": None, **CLIPPED},
    ),
}
