"""A config as a run folder keeps it, and the part of it that a stopped run must go on with."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lmm_r1 import dotted
from lmm_r1.config.model_checks import why_not_during_generation
from lmm_r1.config.ppo import MOST_PASS_TOKENS, PPOConfig
from lmm_r1.config.supervised import KDConfig, SupervisedConfig
from lmm_r1.errors import UserError
from remote_rm.redaction import HIDDEN, hidden_settings

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)
SECRETS = (("logger", "wandb", "key"), ("logger", "swanlab", "key"))

# Values without a plan for settings that a plan chooses by memory: OpenRLHF's defaults.
UNPLANNED: dict[str, object] = {
    "actor.gradient_checkpointing_enable": False,
    "ds.adam_offload": False,
    "ds.enable_sleep": False,
    "ds.zero_stage": 2,
    "model.gradient_checkpointing_enable": False,
    "ref.during_generation": False,
    "ref.offload": False,
    "train.colocate_all": False,
    "train.max_tokens_per_gpu": MOST_PASS_TOKENS,
    "vllm.enable_sleep": False,
    "vllm.gpu_memory_utilization": 0.95,
}
# The same for models and engines that share GPUs.
_SHARED_UNPLANNED: dict[str, object] = {"vllm.enable_sleep": True, "vllm.gpu_memory_utilization": 0.5}
# The same for an engine next to a student and a teacher.
_STUDENT_UNPLANNED: dict[str, object] = {"vllm.gpu_memory_utilization": 0.3}

# Settings that a resumed run may change: display, storage, placement and passes. A trailing dot is
# for a whole group. Models and rows are compared by their content, not by these names.
_FREE = (
    "actor.gradient_checkpointing_enable",
    "actor.gradient_checkpointing_layers",
    "actor.gradient_checkpointing_reentrant",
    "actor.model_name_or_path",
    "ckpt.",
    "critic.model_name_or_path",
    "critic.save_value_network",
    "data.dataloader_num_workers",
    "data.dataset",
    # What these make of the rows is in the rows' digest.
    "data.allow_private_urls",
    "data.bad_rows",
    "data.datasource_key",
    "data.format",
    "data.image_dir",
    "data.max_image_megapixels",
    "data.prompt_dataset",
    "data.prompt_template",
    "data.system_prompt",
    "ds.attn_implementation",
    "ds.deepcompile",
    "ds.enable_sleep",
    "ds.experts_implementation",
    "ds.overlap_comm",
    "eval.",
    "local_rank",
    "logger.",
    "model.gradient_checkpointing_enable",
    "model.gradient_checkpointing_layers",
    "model.gradient_checkpointing_reentrant",
    "model.model_name_or_path",
    "ref.during_generation",
    "ref.model_name_or_path",
    "ref.num_gpus_per_node",
    "ref.num_nodes",
    "ref.offload",
    "reward.deadline_s",
    "reward.model_name_or_path",
    "reward.num_gpus_per_node",
    "reward.num_nodes",
    "reward.offload",
    "reward.remote_url",
    "reward.request_fields",
    "reward.timeout_s",
    "rollout.max_tokens_per_gpu",
    "rollout.micro_batch_size",
    "rollout.vllm_generate_batch_size",
    "teacher.",
    "train.colocate_actor_ref",
    "train.colocate_all",
    "train.colocate_critic_reward",
    "train.dynamic_batch_enable",
    "train.max_tokens_per_gpu",
    "train.memory_check",
    "train.micro_batch_size",
    "train.shared_prefix_enable",
    "train.trust_remote_code",
    "ds.packing_samples",
    "vllm.",
)


def checkpoint_folder(config: PPOConfig | SupervisedConfig) -> Path:
    """Return the folder of the run's checkpoints."""
    ckpt = config.ckpt
    return Path(ckpt.output_dir) / "checkpoints" if ckpt.path is None else Path(ckpt.path)


def unplanned(config: Config) -> Config:
    """Return the settings with what a plan has left open, or was not made for, as it is without one."""
    shares = isinstance(config, PPOConfig) and config.train.colocate_all
    defaults = UNPLANNED | (_SHARED_UNPLANNED if shares else {})
    if isinstance(config, PPOConfig) and not shares and why_not_during_generation(config) is None:
        # Its GPUs have nothing else to do then.
        defaults["ref.during_generation"] = True
    if isinstance(config, KDConfig):
        defaults |= _STUDENT_UNPLANNED
    known = dotted.leaf_types(type(config))
    return dotted.replace(
        config,
        {flag: value for flag, value in defaults.items() if flag in known and dotted.get(config, flag) is None},
    )


def to_yaml(config: PPOConfig | SupervisedConfig) -> str:
    """Return the config as nested YAML that `--config` reads back; secrets are hidden."""
    return yaml.safe_dump(without_secrets(config), sort_keys=False, allow_unicode=True)


def without_secrets(config: PPOConfig | SupervisedConfig) -> dict[str, Any]:
    """Return the config as nested dicts of plain values, with None for keys of other services and other secrets hidden."""
    settings = dataclasses.asdict(config)
    for *groups, name in SECRETS:
        node = settings
        for group in groups:
            node = node[group]
        node[name] = None
    hidden = hidden_settings({name: _plain(value) for name, value in settings.items()})
    assert isinstance(hidden, dict)
    return hidden


def check_not_hidden(config: PPOConfig | SupervisedConfig) -> None:
    """Raise UserError for a flag that has the place holder of a secret, read from the settings in a run folder."""
    for flag in dotted.leaf_types(type(config)):
        if HIDDEN in str(dotted.get(config, flag)):
            raise UserError(
                f"--{flag} holds {HIDDEN}: run_config.yaml has no secrets; give the flag with the secret on the command line, "
                "or in a file for --config"
            )


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def settings_of_the_run(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    """Return by flag what decides what a run learns, as JSON would give it back, with secrets hidden."""
    return {
        flag: hidden_settings(_as_json(dotted.get(config, flag)), name=flag)
        for flag in dotted.leaf_types(type(config))
        if not is_free(flag)
    }


def is_free(flag: str) -> bool:
    """Return whether a stopped run may resume with another value of the flag."""
    return any(flag.startswith(free) if free.endswith(".") else flag == free for free in _FREE)


def _as_json(value: object) -> object:
    return [_as_json(inner) for inner in value] if isinstance(value, tuple) else value
