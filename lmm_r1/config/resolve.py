"""The settings of a run: completed and checked, as its folder keeps them, and those that a resumed run must keep."""

from __future__ import annotations

import dataclasses
import logging
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import yaml

from lmm_r1 import dotted
from lmm_r1.config.declared import check_needs, check_ranges, given, has_effect
from lmm_r1.config.hardware import (
    Offer,
    check_batches,
    default_param_dtype,
    group_size,
    model_gpus,
    offered_gpus,
    settled_counts,
)
from lmm_r1.config.ppo import (
    CLIP_RANGES,
    CONSTANT,
    DEFAULT_VERIFIER,
    MOST_PASS_TOKENS,
    ActorConfig,
    PPOConfig,
    RewardConfig,
)
from lmm_r1.config.rewards import format_prompt, named_verifier, part_weights, reward_functions
from lmm_r1.config.shared import (
    LORA_LR_FACTOR,
    RUNS,
    DeepSpeedConfig,
    OptimizerConfig,
    ThoughtConfig,
    TrackerName,
    text_given,
)
from lmm_r1.config.supervised import DPOConfig, KDConfig, RMConfig, SFTConfig, SupervisedConfig
from lmm_r1.data.messages import NO_PROMPT
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import function_file
from remote_rm.redaction import HIDDEN, hidden_settings

logger = logging.getLogger(__name__)

Config = TypeVar("Config", PPOConfig, KDConfig, SFTConfig, DPOConfig, RMConfig)
Supervised = TypeVar("Supervised", bound=SupervisedConfig)

# Mean differences per token. Rounding to bfloat16 causes 0.01 to 0.05 with released models and vLLM's kernels, experts
# included, and single precision below 1e-3, with TF32 too. A wrong model is off by 0.1 and more.
MISMATCH_LIMITS = {"fp32": 0.01, "bf16": 0.1, "fp16": 0.1}


def resolve_ppo(config: PPOConfig, *, ask: Callable[[], Offer] = offered_gpus) -> PPOConfig:
    """Return `config` with every value that depends on others filled in; values that a plan chooses by memory stay open.

    Args:
        ask: returns the GPUs that there are.

    Raises:
        UserError: a flag is missing, not available in this version, or contradicts another one.
    """
    require(config, "actor.model_name_or_path", example="path/or/hub-name")
    require(config, "data.prompt_dataset", example="datasets/prompts.jsonl")
    check_ranges(config)
    settings = _value_models(config) | _clip_range(config.actor)
    if config.actor.loss_agg_mode == CONSTANT and config.actor.loss_agg_length is None:
        turn = config.rollout.max_new_tokens
        settings["actor.loss_agg_length"] = config.data.max_len if turn is None or config.train.plays else turn
    settings["algo.advantage.is_correction_threshold"] = _low_high(config)
    if not (config.reward.remote_url or config.reward.model_name_or_path or config.train.plays):
        settings["reward.remote_url"] = DEFAULT_VERIFIER
    settings["rollout.n_samples_per_prompt"] = group_size(config)
    if config.rollout.vllm_generate_batch_size is None and config.rollout.batch_size:
        settings["rollout.vllm_generate_batch_size"] = config.rollout.batch_size
    if config.train.dynamic_batch_enable:
        settings["ds.packing_samples"] = True
    if config.vllm.enable_prefix_caching is None:
        settings["vllm.enable_prefix_caching"] = config.train.agent is not None
    settings |= (
        by_what_is_trained(config)
        | _correction(config)
        | _param_dtype(config)
        | _gamma(config)
        | _input_template(config)
        | _trackers(config)
        | _output(config)
    )
    resolved = dotted.replace(config, settings)
    check_needs(config, resolved)
    _tell_adapters(config)
    prompt = _system_prompt(resolved) or format_prompt(resolved) or NO_PROMPT
    counts = settled_counts(resolved, ask=ask)
    resolved = dotted.replace(resolved, _accumulation(resolved) | counts | {"data.system_prompt": prompt})
    if resolved.vllm.enable_sleep and not resolved.train.colocate_all:
        logger.warning("--vllm.enable_sleep is off: without --train.colocate_all the engines share no GPU")
        resolved = dotted.replace(resolved, {"vllm.enable_sleep": False})
    check_ppo(resolved)
    return resolved


def resolve(config: Config) -> Config:
    """Return `config` with every value that depends on others filled in.

    Raises:
        UserError: a flag is missing, not available in this version, or contradicts another one.
    """
    check_not_hidden(config)
    if isinstance(config, PPOConfig):
        return resolve_ppo(config)
    resolved = _resolved(config)
    check_supervised(resolved)
    if isinstance(resolved, DPOConfig) and resolved.has_reference:
        # The reference is the initial model by default.
        reference = resolved.ref.model_name_or_path or resolved.model.model_name_or_path
        return dotted.replace(resolved, {"ref.model_name_or_path": reference})
    return resolved


def _resolved(config: Supervised) -> Supervised:
    """Return the settings of a supervised stage with the open values that all trainers share filled in."""
    require(config, "model.model_name_or_path", example="path/or/hub-name")
    require(config, "data.dataset", example="datasets/rows.jsonl")
    check_ranges(config)
    if config.train.micro_batch_size and config.train.batch_size % config.train.micro_batch_size:
        raise UserError(
            f"--train.batch_size {config.train.batch_size} must be a multiple of "
            f"--train.micro_batch_size {config.train.micro_batch_size}"
        )
    settings = by_what_is_trained(config) | _param_dtype(config) | _input_template(config)
    resolved = dotted.replace(config, settings | _trackers(config) | _output(config))
    check_needs(config, resolved)
    _tell_adapters(config)
    return dotted.replace(resolved, _accumulation(resolved) | {"data.system_prompt": _system_prompt(resolved)})


def _system_prompt(config: PPOConfig | SupervisedConfig) -> str | None:
    """Return the text of the prompt, so that the run's record has it, too."""
    return text_given(config.data.system_prompt, flag="--data.system_prompt")


def by_what_is_trained(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    """Return by flag the learning rates and the adapters' alpha that are open: those of adapters or of all weights."""
    lora = config.ds.lora
    settings: dict[str, object] = {"ds.lora.alpha": lora.used_alpha} if lora.rank and lora.alpha is None else {}
    for flag, model in _rates(config).items():
        if model.adam.lr is None:
            # Rounded: ten times 1e-6 has an error in its last digit.
            settings[flag] = float(f"{model.full_lr * (LORA_LR_FACTOR if lora.rank else 1):g}")
    return settings


def _rates(config: PPOConfig | SupervisedConfig) -> dict[str, OptimizerConfig]:
    """Return by the flag of its learning rate what is trained."""
    if isinstance(config, SupervisedConfig):
        return {"adam.lr": config}
    trained = {"actor.adam.lr": config.actor, "critic.adam.lr": config.critic}
    return {flag: model for flag, model in trained.items() if has_effect(flag, config)}


def _tell_adapters(config: PPOConfig | SupervisedConfig) -> None:
    """Log what adapters are trained with that no flag has named."""
    found = ", ".join(f"--{flag} {value:g}" for flag, value in by_what_is_trained(config).items())
    if config.ds.lora.rank and found:
        logger.warning("LoRA of rank %d: %s, unless they are named", config.ds.lora.rank, found)


def _value_models(config: PPOConfig) -> dict[str, object]:
    """Return the settings of critic and reward model: no critic without GAE, and no sharing of GPUs without both."""
    critic = None
    if config.algo.advantage.estimator == "gae":
        reward_model = None if config.reward.remote_url else config.reward.model_name_or_path
        critic = config.critic.model_name_or_path or reward_model or config.actor.model_name_or_path
    settings: dict[str, object] = {"critic.model_name_or_path": critic}
    if config.train.colocate_critic_reward and not (critic and config.reward.model_name_or_path):
        logger.warning("--train.colocate_critic_reward is off: there is no critic, or no reward model")
        settings["train.colocate_critic_reward"] = False
    return settings


def _clip_range(actor: ActorConfig) -> dict[str, object]:
    """Return the clip range of ratios: that of the flags, or the loss's own."""
    low_high, both = actor.eps_clip_low_high, actor.eps_clip
    if low_high is not None:
        if both is not None and both not in low_high:
            shown = " ".join(f"{bound:g}" for bound in low_high)
            raise UserError(f"--actor.eps_clip {both:g} and --actor.eps_clip_low_high {shown}: give one of them")
        return {}
    if both is not None:
        return {"actor.eps_clip_low_high": (both, both)}
    # A function of the user's own may use the range or not.
    low, high = CLIP_RANGES.get(actor.policy_loss_type, CLIP_RANGES["ppo"])
    if (low, high) != CLIP_RANGES["ppo"] and math.isfinite(high):
        logger.warning("--actor.eps_clip_low_high %g %g: the range for %s", low, high, actor.policy_loss_type)
    return {"actor.eps_clip_low_high": (low, high)}


def _low_high(config: PPOConfig) -> tuple[float, float]:
    match config.algo.advantage.is_correction_threshold:
        case (high,):
            return (0.0, high)
        case (low, high):
            return (low, high)
        case values:
            given = " ".join(map(str, values))
            raise UserError(f"--algo.advantage.is_correction_threshold must be HIGH or LOW HIGH, not {given!r}")


def _correction(config: PPOConfig) -> dict[str, object]:
    """Return the correction for samples of older weights, which asynchronous runs have."""
    flag = "algo.advantage.is_correction_level"
    if dotted.get(config, flag) != "off" or not config.train.async_enable:
        return {}
    logger.warning("--%s is token: with --train.async_enable samples come of older weights than the policy's", flag)
    return {flag: "token"}


def _gamma(config: PPOConfig) -> dict[str, object]:
    """Return a discount of 1 for estimators that compare whole responses, as OpenRLHF does."""
    advantage = config.algo.advantage
    if advantage.estimator in ("gae", "reinforce") or function_file(advantage.estimator) or advantage.gamma == 1.0:
        return {}
    logger.warning(
        "--algo.advantage.gamma %g is not used: %s compares whole responses", advantage.gamma, advantage.estimator
    )
    return {"algo.advantage.gamma": 1.0}


def _accumulation(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    """Return the accumulation precision without ZeRO, for which DeepSpeed supports only that of the weights."""
    given, weights = config.ds.grad_accum_dtype, config.ds.param_dtype
    if config.ds.zero_stage != 0 or weights == given:
        return {}
    logger.warning("--ds.grad_accum_dtype %s is %s: with --ds.zero_stage 0 DeepSpeed knows no other", given, weights)
    return {"ds.grad_accum_dtype": weights}


def _output(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    """Return the run's folder, by default a separate one per stage."""
    return {"ckpt.output_dir": config.ckpt.output_dir or f"{RUNS}/{config.logger.stage_name}"}


def _param_dtype(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    flag = "ds.param_dtype"
    if dotted.get(config, flag) is not None:
        return {}
    return {flag: default_param_dtype(flag=flag, uses_ray=isinstance(config, PPOConfig))}


def _input_template(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    template = config.data.input_template
    if template and "{}" not in template:
        logger.warning("--data.input_template %r has no {} for the prompt and is not used", template)
        return {"data.input_template": None}
    return {}


def _trackers(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    """Return the trackers that are set by name or, as in OpenRLHF, turned on by one of their settings."""
    logger = config.logger
    asked = {"tensorboard": logger.tensorboard_dir, "wandb": logger.wandb.key}
    named = [name for name in typing.get_args(TrackerName) if name in logger.trackers or asked[name]]
    return {"logger.trackers": (*named, *(one for one in dict.fromkeys(logger.trackers) if one not in named))}


def mismatch_limit(config: PPOConfig) -> float:
    """Return `--algo.mismatch_limit`, or what it is for the weights' precision."""
    if config.algo.mismatch_limit is not None:
        return config.algo.mismatch_limit
    assert config.ds.param_dtype is not None, "resolve_ppo fills it in"
    return MISMATCH_LIMITS[config.ds.param_dtype]


Trained = TypeVar("Trained", bound=PPOConfig | SupervisedConfig)

# Values without a plan for settings that a plan chooses by memory: OpenRLHF's defaults.
UNPLANNED: dict[str, object] = {
    "actor.gradient_checkpointing_enable": False,
    "ds.adam_offload": False,
    "ds.enable_sleep": False,
    "ds.zero_stage": 2,
    "model.gradient_checkpointing_enable": False,
    "ref.offload": False,
    "train.colocate_all": False,
    "train.max_tokens_per_gpu": MOST_PASS_TOKENS,
    "vllm.enable_prefix_caching": False,
    "vllm.enable_sleep": False,
    "vllm.gpu_memory_utilization": 0.95,
}
# The same for models and engines that share GPUs.
_SHARED_UNPLANNED: dict[str, object] = {"vllm.enable_sleep": True, "vllm.gpu_memory_utilization": 0.5}

# Settings that a resumed run may change: display, storage, placement and passes. A trailing dot is for a whole group,
# one in front for this name in all groups. Models and rows are compared by their content, not by these names: what
# data.format and the like make of the rows is in the rows' digest. Not actor.eps_clip but its range is compared.
_FREE = tuple("""
    .gradient_checkpointing_enable .gradient_checkpointing_layers .gradient_checkpointing_reentrant
    .max_tokens_per_gpu .micro_batch_size .model_name_or_path .num_gpus_per_node .num_nodes .offload
    actor.eps_clip algo.mismatch_limit ckpt. critic.save_value_network eval. local_rank logger. teacher. vllm.
    data.dataloader_num_workers data.dataset data.bad_rows data.datasource_key data.format data.image_dir
    data.overlong_images data.prompt_dataset data.prompt_template data.system_prompt
    ds.adam_offload ds.attn_implementation ds.deepcompile ds.enable_sleep ds.experts_implementation ds.overlap_comm
    ds.packing_samples ds.ulysses_size ds.use_liger_kernel ds.zero_stage ds.zpg
    reward.deadline_s reward.remote_url reward.request_fields reward.timeout_s rollout.vllm_generate_batch_size
    train.colocate_actor_ref train.colocate_all train.colocate_critic_reward train.dynamic_batch_enable
    train.full_determinism_enable train.memory_check train.shared_prefix_enable train.trust_remote_code
    """.split())


def model_path(config: PPOConfig | SupervisedConfig) -> str:
    """Return the checkpoint of the model that a run trains."""
    path = config.actor.model_name_or_path if isinstance(config, PPOConfig) else config.model.model_name_or_path
    assert path is not None, "resolve requires it"
    return path


def model_paths(config: PPOConfig | SupervisedConfig) -> dict[str, str]:
    """Return the checkpoints that a run starts from, by flag without the dashes."""
    flags = [flag for flag in dotted.leaf_types(type(config)) if flag.endswith(".model_name_or_path")]
    if isinstance(config, DPOConfig) and not config.needs_reference_model:
        flags.remove("ref.model_name_or_path")
    return {flag: str(path) for flag in flags if (path := dotted.get(config, flag)) is not None}


def checkpoint_folder(config: PPOConfig | SupervisedConfig) -> Path:
    """Return the folder of the run's checkpoints."""
    ckpt = config.ckpt
    return Path(ckpt.output_dir) / "checkpoints" if ckpt.path is None else Path(ckpt.path)


def unplanned(config: Trained) -> Trained:
    """Return the settings with what a plan has left open, or was not made for, as it is without one."""
    shares = isinstance(config, PPOConfig) and config.train.colocate_all
    defaults = UNPLANNED | (_SHARED_UNPLANNED if shares else {})
    known = dotted.leaf_types(type(config))
    open_flags = [flag for flag in defaults if flag in known and dotted.get(config, flag) is None]
    return dotted.replace(
        config, {flag: defaults[flag] for flag in open_flags if defaults[flag] is False or has_effect(flag, config)}
    )


def to_yaml(config: PPOConfig | SupervisedConfig) -> str:
    """Return the config as nested YAML that `--config` reads back; secrets are hidden."""
    return yaml.safe_dump(without_secrets(config), sort_keys=False, allow_unicode=True)


def without_secrets(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    """Return the config as nested dicts of plain values, with None for keys of other services and other secrets hidden."""
    settings = dataclasses.asdict(config)
    settings["logger"]["wandb"]["key"] = None
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
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def settings_of_the_run(config: PPOConfig | SupervisedConfig) -> dict[str, object]:
    """Return by flag what decides what a run learns, as JSON would give it back, with secrets hidden."""
    return {
        flag: hidden_settings(_plain(dotted.get(config, flag)), name=flag)
        for flag in dotted.leaf_types(type(config))
        # Earlier versions wrote a number for an open flag without effect.
        if not is_free(flag) and (dotted.get(config, flag) is not None or has_effect(flag, config))
    }


def is_free(flag: str) -> bool:
    """Return whether a stopped run may resume with another value of the flag."""
    name = flag.rpartition(".")[2]
    return any(flag.startswith(free) if free.endswith(".") else free in (flag, f".{name}") for free in _FREE)


def check_ppo(config: PPOConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    samples = config.rollout.n_samples_per_prompt
    if config.train.plays and samples % config.agent.branches:
        raise UserError(
            f"--agent.branches {config.agent.branches} must divide --rollout.n_samples_per_prompt {samples}, of which as many "
            "at a time have turns in common"
        )
    _check_reward_source(config)
    _check_algorithm(config)
    _check_shared_gpus(config)
    packs = config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1
    _check_ulysses(config.ds, packs=config.ds.packing_samples or packs, gpus=model_gpus(config))
    check_batches(config)


def check_supervised(config: SupervisedConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in but a reference."""
    if isinstance(config, KDConfig):
        require(config, "teacher.model_name_or_path", example="path/or/hub-name")
    key = config.ckpt.best_metric_key
    if key not in ("", "none") and not key.startswith("eval_"):
        raise UserError(
            f"--ckpt.best_metric_key {key} names no metric of an evaluation; give one such as eval_loss, or none"
        )
    shares = isinstance(config, DPOConfig | RMConfig) and config.train.shared_prefix_enable
    _check_ulysses(config.ds, packs=config.ds.packing_samples or shares, gpus={})


def require(config: PPOConfig | SupervisedConfig, flag: str, *, example: str) -> None:
    """Raise UserError if a required flag is missing."""
    if not dotted.get(config, flag):
        raise UserError(f"--{flag} is missing; give for example --{flag} {example}")


def check_thought(thought: ThoughtConfig, *, prefix: str) -> None:
    """Raise UserError for settings of budget forcing that are impossible or have no effect.

    Args:
        prefix: prefix of a setting's name in messages.
    """
    check_ranges(thought, prefix=prefix)
    check_needs(thought, thought, prefix=prefix)
    if not thought.end:
        raise UserError(f"{prefix}end is empty; give the text that ends a thought, such as {ThoughtConfig.end}")
    if not thought.continue_with or thought.end in thought.continue_with:
        raise UserError(
            f"{prefix}continue_with {thought.continue_with!r} does not go on with a thought; give a text such as "
            f"{ThoughtConfig.continue_with}, without {thought.end}"
        )


def _check_algorithm(config: PPOConfig) -> None:
    actor, advantage = config.actor, config.algo.advantage
    low_high = actor.eps_clip_low_high
    assert low_high is not None, "resolve_ppo fills it in"
    if actor.policy_loss_type == "sapo" and low_high != CLIP_RANGES["sapo"]:
        raise UserError(
            f"{given('actor.eps_clip_low_high', low_high)} has no part in --actor.policy_loss_type sapo, which clips nothing; "
            "leave it out, and see --actor.sapo_temperature_pos"
        )
    divides = advantage.is_correction_level != "off" and advantage.is_correction_gating != "ratio"
    if divides and advantage.is_correction_threshold[0] > 0:
        raise UserError(
            f"--algo.advantage.is_correction_gating {advantage.is_correction_gating} has only an upper bound; give one number "
            "as --algo.advantage.is_correction_threshold"
        )


def _check_shared_gpus(config: PPOConfig) -> None:
    """Raise UserError for models or engines that share GPUs and have other numbers of them."""
    train, vllm = config.train, config.vllm
    pairs: list[tuple[str, str, str]] = []
    names = [name for name in ("critic", "reward") if name in config.placed]
    if train.colocate_critic_reward and names:
        pairs.append(("critic", "reward", "--train.colocate_critic_reward"))
    elif train.colocate_all:
        pairs += [("actor", name, "--train.colocate_all") for name in names]
    if (train.colocate_all or train.colocate_actor_ref) and config.needs_reference_model:
        shared = "--train.colocate_all" if train.colocate_all else "--train.colocate_actor_ref"
        pairs.append(("actor", "ref", shared))
    for one, other, because in pairs:
        for name in ("num_nodes", "num_gpus_per_node"):
            ours, theirs = (getattr(getattr(config, group), name) for group in (one, other))
            if ours != theirs:
                raise UserError(f"with {because}, --{one}.{name} {ours} and --{other}.{name} {theirs} must be equal")
    if train.colocate_all and config.actor.gpus != vllm.gpus:
        raise UserError(
            f"with --train.colocate_all the engines take the policy's GPUs: --actor.num_nodes {config.actor.num_nodes} x "
            f"--actor.num_gpus_per_node {config.actor.num_gpus_per_node} = {config.actor.gpus}, but --vllm.num_engines "
            f"{vllm.num_engines} x --vllm.tensor_parallel_size {vllm.tensor_parallel_size} = {vllm.gpus}; make them equal"
        )


def _check_ulysses(ds: DeepSpeedConfig, *, packs: bool, gpus: Mapping[str, int]) -> None:
    """Raise UserError if ranks cannot share sequences as `--ds.ulysses_size` requires.

    Args:
        packs: whether samples are packed.
        gpus: number of GPUs of each model, by the name of its flag group.
    """
    if ds.ulysses_size > 1 and not packs:
        raise UserError(f"--ds.ulysses_size {ds.ulysses_size} splits packed sequences; add --ds.packing_samples")
    for flag in ("ulysses_size", "tensor_parallel_size"):
        for name, count in gpus.items():
            if count % getattr(ds, flag):
                raise UserError(
                    f"--ds.{flag} {getattr(ds, flag)} does not divide the {count} GPUs of --{name}.num_nodes x "
                    f"--{name}.num_gpus_per_node; take a number that does"
                )


def _check_reward_source(config: PPOConfig) -> None:
    functions, verifier = reward_functions(config.reward), named_verifier(config.reward)
    part_weights(config.reward)
    idle = ("timeout_s",) if functions else ("timeout_s", "deadline_s") if verifier is not None else ()
    for name in idle:
        if getattr(config.reward, name) != getattr(RewardConfig, name):
            instead = "the limit of functions, per prompt, is --reward.deadline_s" if functions else "leave it out"
            raise UserError(
                f"--reward.{name} {getattr(config.reward, name):g} has no effect on --reward.remote_url "
                f"{config.reward.remote_url}, which asks no server; {instead}"
            )
