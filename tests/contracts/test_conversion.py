"""The example configurations of EasyR1, LMM-R1 and Mini-o3 become the flags that were worked out by hand."""

import re
from pathlib import Path

import pytest

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.convert_config import main
from lmm_r1.cli.yaml_file import parse_settings
from lmm_r1.config import PPOConfig, SFTConfig, resolve
from lmm_r1.config.conversion import Conversion, convert, read_run, to_document
from lmm_r1.config.conversion.easyr1 import EASYR1
from lmm_r1.config.conversion.openrlhf_06 import TABLES, old_flag
from lmm_r1.config.conversion.verl import VERL
from lmm_r1.errors import UserError

pytestmark = pytest.mark.contract

DATA = Path(__file__).resolve().parents[1] / "data" / "conversion"
EASYR1_FILE = DATA / "easyr1.yaml"
KNOWN = dotted.leaf_types(PPOConfig)

# Flags that not every version has; where they are missing, notes say so.
HOPED = {
    "data.min_pixels": 262144,
    "data.max_pixels": 4194304,
    "data.prompt_template": "./examples/format_prompt/math.jinja",
    "data.video_key": "videos",
    "data.video_fps": 2.0,
    "data.image_dir": None,
    "data.tokenizer_chat_template": None,
    "train.max_steps": None,
    "eval.before_training": True,
}
# data.val_batch_size, the two parts of val_override_config that are set, and what is shown of a validation.
EASYR1_LEFT_OUT = {
    "data.val_batch_size",
    "worker.rollout.val_override_config.top_p",
    "worker.actor.model.lora.alpha",
    "worker.actor.model.lora.target_modules",
    "trainer.val_generations_to_log",
}
HOPED_SETTINGS = {
    "data.min_pixels": "data.min_pixels",
    "data.max_pixels": "data.max_pixels",
    "data.prompt_template": "data.format_prompt",
    "eval.before_training": "trainer.val_before_train",
}
EASYR1_FLAGS = {
    "actor.model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.gradient_checkpointing_enable": True,
    "actor.freeze_visual_encoder": False,
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.999],  # their default
    "actor.adam.weight_decay": 0.01,
    "actor.lr_scheduler": "constant_with_warmup",
    "actor.lr_warmup_ratio": 0.0,
    "actor.max_norm": 1.0,
    "actor.eps_clip_low_high": [0.2, 0.3],
    "actor.dual_clip": 3.0,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": True,
    "algo.kl.estimator": "k3",
    "algo.dynamic_filtering_enable": False,
    "algo.dynamic_filtering_range": [0.01, 0.99],
    "ckpt.output_dir": "checkpoints/easy_r1/qwen2_5_7b_math_grpo",
    "ckpt.save_steps": 5,
    "ckpt.max_num": 3,
    "ckpt.load_enable": True,
    "data.prompt_dataset": "hiyouga/math12k",
    "data.prompt_split": "train",
    "data.input_key": "problem",
    "data.label_key": "answer",
    "data.image_key": "images",
    "data.max_images_per_prompt": 0,
    "data.max_len": 4096,  # 2048 + 2048
    "data.overlong_prompts": "skip",
    "ds.zero_stage": 3,
    "ds.param_dtype": "bf16",
    "ds.enable_sleep": True,
    "ds.packing_samples": True,
    "ds.ulysses_size": 1,
    "ds.lora.rank": 0,
    "eval.dataset": "hiyouga/math12k",
    "eval.split": "test",
    "eval.steps": 5,
    "eval.n_samples_per_prompt": 1,
    "eval.temperature": 0.6,
    "logger.trackers": ["wandb"],
    "logger.wandb.project": "easy_r1",
    "logger.wandb.run_name": "qwen2_5_7b_math_grpo",
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 8,
    "ref.offload": True,
    "reward.remote_url": "./examples/reward_function/math.py:compute_score",
    "rollout.batch_size": 512,
    "rollout.n_samples_per_prompt": 5,
    "rollout.max_new_tokens": 2048,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.micro_batch_size": 2,
    "rollout.max_tokens_per_gpu": 8192,  # 2 x 4096
    "train.batch_size": 640,  # 128 prompts x 5
    "train.micro_batch_size": 1,
    "train.max_tokens_per_gpu": 4096,
    "train.dynamic_batch_enable": True,
    "train.colocate_all": True,
    "train.num_episodes": 15,
    "train.seed": 1,
    "train.trust_remote_code": False,
    "vllm.num_engines": 4,  # 8 GPUs, 2 each
    "vllm.tensor_parallel_size": 2,
    "vllm.gpu_memory_utilization": 0.6,
    "vllm.enable_sleep": True,
    "vllm.enforce_eager": False,
}

GEO3K = "data.train_files=hiyouga/geometry3k@train data.val_files=hiyouga/geometry3k@test"
GEO3K_FLAGS = {"data.prompt_dataset": "hiyouga/geometry3k", "eval.dataset": "hiyouga/geometry3k"}


def named(name: str) -> dict[str, object]:
    return {"logger.wandb.run_name": name, "ckpt.output_dir": f"checkpoints/easy_r1/{name}"}


def a_model(path: str, name: str) -> dict[str, object]:
    return {"actor.model_name_or_path": path, **named(name)}


VL7B, VL3B = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct"
BF16 = "worker.actor.fsdp.torch_dtype=bf16 worker.actor.optim.strategy=adamw_bf16"
ONE_ENGINE_PER_GPU = {"vllm.num_engines": 8, "vllm.tensor_parallel_size": 1}
# What each example script of EasyR1 gives beside the file, what that changes, and what is left out more.
EASYR1_SCRIPTS: dict[str, tuple[str, dict[str, object], set[str]]] = {
    "qwen2_5_7b_math_grpo": ("", {}, set()),
    "qwen2_5_vl_7b_geo3k_grpo": (
        f"{GEO3K} worker.actor.model.model_path={VL7B} trainer.experiment_name=qwen2_5_vl_7b_geo_grpo",
        GEO3K_FLAGS | a_model(VL7B, "qwen2_5_vl_7b_geo_grpo"),
        set(),
    ),
    "qwen2_5_vl_3b_geo3k_grpo": (
        f"{GEO3K} worker.actor.model.model_path={VL3B} worker.rollout.tensor_parallel_size=1 "
        "trainer.experiment_name=qwen2_5_vl_3b_geo_grpo trainer.n_gpus_per_node=2",
        GEO3K_FLAGS
        | a_model(VL3B, "qwen2_5_vl_3b_geo_grpo")
        | {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2}
        | {"vllm.num_engines": 2, "vllm.tensor_parallel_size": 1},
        set(),
    ),
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
            "reward.remote_url": "./examples/reward_function/dapo.py:compute_score",
            "reward.function_kwargs": '{"max_response_length": 20480, "overlong_buffer_length": 4096}',
            "reward.score_key": "accuracy_normalized",
            "algo.kl.init_coef": 0.0,
            "algo.kl.use_loss": None,
            "algo.kl.estimator": None,
            "algo.dynamic_filtering_enable": True,
            "train.num_episodes": 10,
        },
        {
            "data.mini_rollout_batch_size",
            "worker.actor.optim.lr_warmup_steps",
            "worker.rollout.max_num_batched_tokens",
            "trainer.max_try_make_batch",
        },
    ),
    "qwen2_5_vl_7b_geo3k_dapo": (
        f"{GEO3K} worker.actor.clip_ratio_high=0.28 algorithm.disable_kl=True algorithm.online_filtering=True",
        GEO3K_FLAGS
        | {"actor.eps_clip_low_high": [0.2, 0.28], "algo.kl.init_coef": 0.0, "algo.dynamic_filtering_enable": True}
        | {"algo.kl.use_loss": None, "algo.kl.estimator": None},
        set(),
    ),
    "qwen2_5_vl_7b_geo3k_gspo": (
        f"{GEO3K} worker.actor.loss_type=gspo_token worker.actor.loss_avg_mode=seq worker.actor.clip_ratio_low=3e-4 "
        "worker.actor.clip_ratio_high=4e-4 algorithm.disable_kl=True",
        GEO3K_FLAGS
        | {"actor.policy_loss_type": "gspo", "actor.loss_agg_mode": "seq-mean-token-mean"}
        | {"actor.eps_clip_low_high": [3e-4, 4e-4]}
        | {"algo.kl.init_coef": 0.0, "algo.kl.use_loss": None, "algo.kl.estimator": None},
        set(),
    ),
    "qwen2_5_vl_7b_geo3k_cispo": (
        f"{GEO3K} worker.actor.loss_type=cispo worker.actor.clip_ratio_low=0 worker.actor.clip_ratio_high=4",
        GEO3K_FLAGS | {"actor.eps_clip_low_high": [0.0, 4.0]},
        {"worker.actor.loss_type"},
    ),
    "qwen2_5_vl_7b_geo3k_sapo": (
        f"{GEO3K} worker.actor.loss_type=sapo worker.actor.tau_positive=1.0 worker.actor.tau_negative=1.05",
        GEO3K_FLAGS,
        {"worker.actor.loss_type", "worker.actor.tau_positive", "worker.actor.tau_negative"},
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
    "qwen2_5_vl_3b_clevr70k_grpo": (
        "data.train_files=BUAADreamer/clevr_count_70k@train data.val_files=BUAADreamer/clevr_count_70k@test "
        "worker.rollout.tensor_parallel_size=1",
        {"data.prompt_dataset": "BUAADreamer/clevr_count_70k", "eval.dataset": "BUAADreamer/clevr_count_70k"}
        | ONE_ENGINE_PER_GPU,
        set(),
    ),
    "glm4.1v_base_geo3k_grpo": (f"{GEO3K} worker.actor.padding_free=False", GEO3K_FLAGS, set()),
}

LMM_R1_FLAGS = {
    "actor.model_name_or_path": VL3B,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.gradient_checkpointing_enable": True,
    "algo.kl.init_coef": 0.001,
    "algo.kl.estimator": "k1",
    "ckpt.save_steps": 20,
    "critic.num_nodes": 1,
    "critic.num_gpus_per_node": 8,
    "critic.value_clip": 0.2,  # their default
    "data.input_key": "message",
    "data.label_key": "answer",
    "data.max_len": 8192,  # 4096 + 4096
    "ds.zero_stage": 3,
    "ds.param_dtype": "bf16",
    "logger.trackers": ["wandb"],
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
FRE = {"actor.model_name_or_path": "./checkpoints/lmm-r1-fre-text"}
MORE_ROOM = {"rollout.max_new_tokens": 8192, "data.max_len": 12288}
ONE_AT_A_TIME = {"rollout.micro_batch_size": 1, "train.micro_batch_size": 1}
# What each stage of LMM-R1 is beside the common settings: rows, estimator, learning rate, folder, and the rest.
LMM_R1_SCRIPTS: dict[str, tuple[str, str, float, str, dict[str, object]]] = {
    "fre_text": ("deepscaler_message.jsonl", "reinforce_baseline", 4e-7, "/checkpoints/lmm-r1-fre-text", {}),
    "fre_multi": ("mathv60k_message.jsonl", "reinforce_baseline", 1e-6, "./checkpoints/lmm-r1-fre-multi", {}),
    "mgt_geo": ("mathv_geo_message.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-mgt-geo", FRE),
    "mgt_percereas": (
        *("mathv60k_message.jsonl", "reinforce_baseline", 4e-7, "./checkpoints/lmm-r1-mgt-percereas"),
        FRE | MORE_ROOM | ONE_AT_A_TIME,
    ),
    "direct_rl_geo": ("MathV360k/geo_split.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-direct-rl-geo", {}),
    "sokoban": (
        *("sokoban.jsonl", "gae", 1e-6, "./checkpoints/lmm-r1-sokoban"),
        ONE_AT_A_TIME
        | {"rollout.batch_size": 128, "train.batch_size": 128, "train.num_episodes": 4, "ckpt.save_steps": 5}
        | {"rollout.max_new_tokens": 8196, "data.max_len": 12292, "algo.kl.init_coef": 0, "critic.adam.lr": 5e-6}
        | {"actor.freeze_visual_encoder": True, "data.label_key": None},
    ),
}


def converted(path: Path, *overrides: str) -> Conversion:
    run = read_run(path, overrides)
    return convert(run.values, run.table, shown=run.shown)


def left_out(conversion: Conversion) -> set[str]:
    return {note.subject for note in conversion.notes if note.kind == "without counterpart"}


def there(flags: dict[str, object]) -> dict[str, object]:
    """The expected flags of this version: None stands for a flag that is not written down."""
    return {name: value for name, value in flags.items() if name in KNOWN and (value is not None or name in HOPED)}


def read_back(conversion: Conversion) -> PPOConfig | SFTConfig:
    """The config that our own parser makes of the written file."""
    config_class = {"train_ppo_ray": PPOConfig, "train_sft": SFTConfig}[conversion.command]
    document = to_document(conversion, source="a test", system="another")
    return dotted.replace(config_class(), parse_settings(document, dotted.leaf_types(config_class), source="document"))


@pytest.mark.parametrize("script", EASYR1_SCRIPTS)
def test_an_example_of_easyr1_becomes_the_flags_worked_out_by_hand(script, tmp_path):
    overrides, changes, more_left_out = EASYR1_SCRIPTS[script]
    conversion = converted(EASYR1_FILE, *overrides.split())
    assert conversion.flags == there(EASYR1_FLAGS | HOPED | changes)
    missing = {theirs for ours, theirs in HOPED_SETTINGS.items() if ours not in KNOWN}
    expected = EASYR1_LEFT_OUT | missing | more_left_out
    if "ds.lora.alpha" in changes:
        expected -= {"worker.actor.model.lora.alpha", "worker.actor.model.lora.target_modules"}
    assert left_out(conversion) == expected
    config = read_back(conversion)
    # A file with a template is not there to be read.
    resolved = resolve(
        config if "data.prompt_template" not in KNOWN else dotted.replace(config, {"data.prompt_template": None})
    )
    assert resolved.rollout.batch_size == 512


@pytest.mark.parametrize("script", LMM_R1_SCRIPTS)
def test_a_script_of_lmm_r1_becomes_the_flags_worked_out_by_hand(script):
    rows, estimator, lr, folder, changes = LMM_R1_SCRIPTS[script]
    own = {
        "data.prompt_dataset": f"./{rows}",
        "algo.advantage.estimator": estimator,
        "actor.adam.lr": lr,
        "ckpt.output_dir": folder,
        "logger.wandb.run_name": script,
    }
    conversion = converted(DATA / f"lmm_r1_{script}.bash")
    assert conversion.flags == there(LMM_R1_FLAGS | own | changes)
    assert left_out(conversion) == set()
    told = {note.subject for note in conversion.notes}
    frozen = {"freeze_prefix"} if script == "sokoban" else set()
    assert told == {"use_wandb", "vllm_sync_backend", "flash_attn", "prompt_max_len, generate_max_len"} | frozen
    assert resolve(read_back(conversion)).algo.advantage.estimator == estimator


def test_mini_o3_becomes_what_can_be_trained_here_and_a_list_of_what_cannot():
    conversion = converted(DATA / "mini_o3.bash")
    expected = {
        "data.prompt_dataset": "/data/minio3/VisualProbe_train/train.json,/data/minio3/DeepEyes_train_4K/train.json",
        "data.label_key": "solution",
        "data.max_len": 16384,
        "data.max_images_per_prompt": 12,
        "rollout.batch_size": 256,
        "rollout.n_samples_per_prompt": 16,
        "train.batch_size": 512,  # 32 prompts x 16
        "actor.eps_clip_low_high": [0.2, 0.3],
        "actor.num_nodes": 8,
        "vllm.num_engines": 64,
        "algo.kl.init_coef": 0.0,
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_range": [0.0, 1.0],
        "eval.n_samples_per_prompt": 1,
        "eval.temperature": 0.0,
        "eval.steps": 5,
        "ckpt.output_dir": "./save",
        "train.num_episodes": 100,
        "train.dynamic_batch_enable": False,
    }
    assert {name: conversion.flags[name] for name in expected} == expected
    assert {
        "actor_rollout_ref.rollout.max_generation_round",
        "actor_rollout_ref.actor.ignore_exceed",
        "data.tool_call",
        "reward_model.use_hybrid_reward_manager",
        "algorithm.kl_ctrl.kl_coef",
    } <= left_out(conversion)
    # Notes have the names of the file, not those of the table.
    assert not any("worker." in note.subject + note.text for note in conversion.notes)
    read_back(conversion)


OTHER_VALUES: dict[str, object] = {
    "algorithm.adv_estimator": "rloo",
    "algorithm.kl_penalty": "mse",
    "algorithm.kl_type": "adaptive",
    "algorithm.filter_key": "accuracy",
    "data.train_files": "other@test",
    "data.val_files": "other",
    "trainer.logger": ["mlflow"],
    "trainer.n_gpus_per_node": 4,
    "trainer.critic_warmup": 4,
    "worker.actor.loss_type": "gspo",
    "worker.actor.loss_avg_mode": "seq",
    "worker.actor.optim.betas": [0.8, 0.9],
    "worker.actor.optim.lr_scheduler_type": "cosine",
    "worker.actor.model.lora.exclude_modules": "none",
    "worker.rollout.tensor_parallel_size": 1,
    "worker.rollout.val_override_config": {"n": 8},
    "worker.reward.reward_function_kwargs": {"weight": 1},
    "worker.actor.model.override_config": {"a": 1},
}


def another(name: str, default: object) -> object:
    """A value that is not the default."""
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, (int, float)) else "3"


@pytest.mark.parametrize("name", [setting.name for setting in EASYR1.settings])
def test_no_setting_of_easyr1_is_ignored(name):
    base = {"data.val_files": "v", "trainer.val_freq": 5, "worker.actor.dynamic_batching": True}
    setting = EASYR1.by_name[name]
    before = convert(base, EASYR1)
    after = convert(base | {name: another(name, base.get(name, setting.default))}, EASYR1)
    assert (before.flags, before.notes) != (after.flags, after.notes)


@pytest.mark.parametrize("name", [setting.name for setting in VERL.settings if setting.name not in EASYR1.by_name])
def test_no_setting_of_verl_is_ignored(name):
    special = {"actor_rollout_ref.rollout.limit_mm_per_prompt": {"image": 3}, "algorithm.use_kl_in_reward": True}
    base = {"custom_reward_function.path": "r.py", "data.val_files": "v", "trainer.val_freq": 5}
    before = convert(base, VERL)
    after = convert(base | {name: special.get(name, "3")}, VERL)
    assert (before.flags, before.notes) != (after.flags, after.notes)


@pytest.mark.parametrize(
    ("command", "name"), [(command, setting.name) for command, table in TABLES.items() for setting in table.settings]
)
def test_no_flag_of_openrlhf_06_is_ignored_or_unknown_to_the_trainers(command, name):
    table = TABLES[command]
    special = {
        "limit_mm_per_prompt": {"image": 3},
        "processor_kwargs": {"max_pixels": 3},
        "adam_betas": [0.1, 0.2],
        "ring_attn_size": 2,
        "reward_clip_range": [0, 1],
    }
    default = table.by_name[name].default
    base: dict[str, object] = {"eval_dataset": "e"}
    before = convert(base, table)
    value = special.get(name, True if default is False else another(name, default))
    after = convert(base | {name: value}, table)
    assert (before.flags, before.notes) != (after.flags, after.notes)
    config_class = {"train_ppo_ray": PPOConfig, "train_sft": SFTConfig}[command]
    assert old_flag(name, config_class=config_class)


# Written down from the survey of EasyR1's configuration; a name with a dot at its end is that of a group.
EASYR1_KEYS = """
data: train_files val_files prompt_key answer_key image_key video_key image_dir video_fps max_prompt_length
 max_response_length rollout_batch_size mini_rollout_batch_size val_batch_size format_prompt override_chat_template
 shuffle seed min_pixels max_pixels filter_overlong_prompts filter_overlong_prompts_workers
algorithm: adv_estimator disable_kl use_kl_loss kl_penalty kl_coef kl_type kl_horizon kl_target gamma lam
 online_filtering filter_key filter_low filter_high
worker.actor: global_batch_size micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience
 max_grad_norm clip_ratio_low clip_ratio_high clip_ratio_dual loss_type loss_avg_mode ppo_epochs padding_free
 dynamic_batching ulysses_size use_torch_compile tau_positive tau_negative model.model_path model.tokenizer_path
 model.override_config model.enable_gradient_checkpointing model.trust_remote_code model.freeze_vision_tower
 model.lora.rank model.lora.alpha model.lora.target_modules model.lora.exclude_modules optim.lr optim.betas
 optim.weight_decay optim.strategy optim.lr_warmup_ratio optim.lr_warmup_steps optim.lr_scheduler_type
 optim.min_lr_ratio fsdp.enable_full_shard fsdp.enable_cpu_offload fsdp.enable_rank0_init fsdp.torch_dtype
 fsdp.fsdp_size fsdp.mp_param_dtype fsdp.mp_reduce_dtype fsdp.mp_buffer_dtype offload.offload_params
 offload.offload_optimizer
worker.rollout: n temperature top_p top_k seed limit_images gpu_memory_utilization tensor_parallel_size max_model_len
 max_num_batched_tokens enforce_eager enable_chunked_prefill disable_tqdm val_override_config
worker.reward: reward_function reward_function_kwargs skip_special_tokens num_cpus
trainer: total_epochs max_steps project_name experiment_name logger nnodes n_gpus_per_node max_try_make_batch
 critic_warmup val_freq val_before_train val_only val_generations_to_log save_freq save_limit save_model_only
 save_checkpoint_path load_checkpoint_path find_last_checkpoint ray_timeline
"""


def test_every_setting_that_easyr1_is_known_to_have_is_in_the_table():
    group, listed = "", []
    for word in EASYR1_KEYS.split():
        if word.endswith(":"):
            group = word[:-1]
        else:
            listed.append(f"{group}.{word}")
    assert len(listed) > 100
    assert set(listed) <= EASYR1.by_name.keys()


def test_a_script_of_easyr1_is_read_with_the_file_that_it_names(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/config.yaml").write_text(EASYR1_FILE.read_text())
    script = tmp_path / "examples/geo3k.sh"
    script.write_text(
        "set -x\nMODEL_PATH=Qwen/Qwen2.5-VL-7B-Instruct  # replace it\n\npython3 -m verl.trainer.main \\\n"
        "    config=examples/config.yaml \\\n    worker.actor.model.model_path=${MODEL_PATH} \\\n    trainer.nnodes=2\n"
    )
    flags = converted(script, "trainer.nnodes=4").flags
    assert (flags["actor.model_name_or_path"], flags["actor.num_nodes"]) == (VL7B, 4)
    assert flags["vllm.num_engines"] == 16


def test_an_earlier_name_is_understood_and_shown_as_it_was_given(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text("trainer: {total_episodes: 3}\nworker: {reward: {score_function: 'r.py:f', reward_type: batch}}\n")
    conversion = converted(file)
    assert (conversion.flags["train.num_episodes"], conversion.flags["reward.remote_url"]) == (3, "r.py:f")
    assert any('REWARD_TYPE = "batch"' in note.text for note in conversion.notes)


def test_the_command_writes_a_file_that_the_trainer_takes(tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    main([str(DATA / "lmm_r1_fre_text.bash"), "--output", str(out)])
    printed = capsys.readouterr()
    assert re.search(
        r"ours.yaml: \d+ settings for train_ppo_ray; 0 have no counterpart, 2 mean something else", printed.out
    )
    assert printed.err == ""
    config = parse(PPOConfig, ["--config", str(out)], prog="test", description="")
    assert config.rollout.n_samples_per_prompt == 16
    assert "# Run: lmm-r1 train_ppo_ray --config THIS_FILE" in out.read_text()
    main([str(DATA / "lmm_r1_fre_text.bash")])
    assert capsys.readouterr().out == out.read_text()


def test_what_the_trainer_will_refuse_is_said_at_once(capsys):
    main([str(EASYR1_FILE), "worker.reward.reward_function=null"])
    assert "train_ppo_ray will refuse this until it is mended: nothing gives rewards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "data: [\n", "a.yaml:2: not valid YAML"),
        ("a.yaml", "model: {a: 1}\n", "neither settings of EasyR1"),
        ("a.yaml", "trainer:\n  nnodes: ${oc.env:N}\n", r"a.yaml:2: OmegaConf would put another value"),
        ("a.yaml", "trainer: {nnodes: two}\n", "trainer.nnodes is 'two', and must be a number"),
        ("a.yaml", "trainer: {n_gpus_per_node: 3}\n", "tensor_parallel_size 2 does not divide the 3 GPUs"),
        ("a.yaml", "algorithm: {adv_estimator: best}\n", "adv_estimator 'best' is none that is known here"),
        ("a.sh", "echo hello\n", "no command in it runs python -m openrlhf.cli."),
        ("a.sh", "python -m openrlhf.cli.train_dpo --pretrain m\n", "openrlhf.cli.train_dpo is not converted"),
        (
            "a.sh",
            "python -m openrlhf.cli.train_sft \\\n  --pretrain m \\\n  --dataset $DATA\n",
            r"a.sh:3: cannot read \$DATA: it is not set in this file",
        ),
        (
            "a.sh",
            "D=$(ls | head)\npython -m openrlhf.cli.train_sft --dataset $D\n",
            r"a.sh:1: cannot read \$\(ls \| head\): only bash could tell",
        ),
        (
            "a.sh",
            'if [ -n "$X" ]; then\n  D=a\nfi\npython -m openrlhf.cli.train_sft --dataset $D\n',
            "a.sh:4: cannot read .D: line 2 sets it under a condition",
        ),
        (
            "a.sh",
            "python -m openrlhf.cli.train_sft --dataset a\npython -m openrlhf.cli.train_sft --dataset b\n",
            "commands that train are in lines 1, 2",
        ),
        ("a.sh", "python -m openrlhf.cli.train_sft --dataset 'a\n", "a.sh:1: a quote ' is opened"),
        ("a.sh", "python3 -m verl.trainer.main config=no.yaml a.b=1\n", "a.sh:1: no file no.yaml"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        converted(tmp_path / name)


@pytest.mark.parametrize(
    ("config_class", "argv", "said"),
    [
        (PPOConfig, ["--pretrain", "m"], "--pretrain is --actor.model_name_or_path here"),
        (SFTConfig, ["--pretrain", "m"], "--pretrain is --model.model_name_or_path here"),
        (PPOConfig, ["--micro_train_batch_size", "2"], "--micro_train_batch_size is --train.micro_batch_size here"),
        (SFTConfig, ["--learning-rate=1e-6"], "--learning-rate is --adam.lr here"),
        (PPOConfig, ["--l2", "0"], "--l2 is --actor.adam.weight_decay and --critic.adam.weight_decay here"),
        (PPOConfig, ["--prompt_max_len", "9"], "--prompt_max_len is a part of --data.max_len here"),
        (PPOConfig, ["--ptx_coef", "1"], "--ptx_coef has no counterpart here: there is no pre-training loss"),
        (PPOConfig, ["--freeze_prefix", "visual"], "--freeze_prefix is --actor.freeze_visual_encoder here"),
    ],
)
def test_a_trainer_that_is_given_an_old_flag_names_ours(config_class, argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(config_class, argv, prog="lmm-r1 train", description="")
    assert stopped.value.code == 2
    assert f"lmm-r1 train: error: {said}" in capsys.readouterr().err
