"""What follows from the flags together: values left open are filled in, contradictions are refused."""

import logging
import typing
from urllib.parse import urlsplit

from lmm_r1 import dotted
from lmm_r1.config.differences import INSTEAD, NOT_YET
from lmm_r1.config.mismatch import check_mismatch_limit
from lmm_r1.config.ppo import ActorConfig, PPOConfig
from lmm_r1.config.precision import default_param_dtype
from lmm_r1.config.sft import ModelConfig, SFTConfig
from lmm_r1.config.shared import TrackerName
from lmm_r1.config.ulysses import check_ulysses
from lmm_r1.config.value_models import check_value_models, value_model_settings
from lmm_r1.errors import UserError

logger = logging.getLogger(__name__)

# These take their baseline from the group, so a group of one has no advantage at all.
GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")


def resolve_ppo(config: PPOConfig) -> PPOConfig:
    """Return `config` with every value that depends on others filled in.

    Raises:
        UserError: a flag is missing, not available in this version, or contradicts another one.
    """
    _refuse_what_is_not_there_yet(config)
    _require(config, "actor.model_name_or_path", example="path/or/hub-name")
    _require(config, "data.prompt_dataset", example="datasets/prompts.jsonl")
    settings = value_model_settings(config)
    if config.actor.eps_clip_low_high is None:
        settings["actor.eps_clip_low_high"] = (config.actor.eps_clip, config.actor.eps_clip)
    settings["algo.advantage.is_correction_threshold"] = _low_high(config)
    if config.rollout.vllm_generate_batch_size is None:
        settings["rollout.vllm_generate_batch_size"] = config.rollout.batch_size
    if config.train.dynamic_batch_enable:
        settings["ds.packing_samples"] = True
    if config.vllm.enable_sleep and not config.train.colocate_all:
        logger.warning("--vllm.enable_sleep is off: without --train.colocate_all the engines share no GPU")
        settings["vllm.enable_sleep"] = False
    settings |= _param_dtype(config) | _gamma(config) | _input_template(config) | _trackers(config)
    resolved = dotted.replace(config, settings)
    resolved = dotted.replace(resolved, _accumulation(resolved))
    _refuse_agents(resolved)
    _check_accumulation(resolved)
    check_value_models(resolved)
    _check_groups(resolved)
    _check_gpus(resolved)
    _check_ulysses(resolved)
    _check_batches(resolved)
    _check_kl(resolved)
    _check_aux_loss(config.actor, prefix="actor.")
    check_mismatch_limit(resolved)
    _check_vision_lr(config.actor.optim, config.actor.adam.vision_lr, prefix="actor.")
    if resolved.critic.model_name_or_path is not None:
        _check_vision_lr(config.critic.optim, config.critic.adam.vision_lr, prefix="critic.")
    return resolved


def resolve_sft(config: SFTConfig) -> SFTConfig:
    """Return `config` with every value that depends on others filled in.

    Raises:
        UserError: a flag is missing, not available in this version, or contradicts another one.
    """
    _refuse_what_is_not_there_yet(config)
    _require(config, "model.model_name_or_path", example="path/or/hub-name")
    _require(config, "data.dataset", example="datasets/rows.jsonl")
    if config.train.batch_size % config.train.micro_batch_size:
        raise UserError(
            f"--train.batch_size {config.train.batch_size} must be a multiple of "
            f"--train.micro_batch_size {config.train.micro_batch_size}"
        )
    resolved = dotted.replace(config, _param_dtype(config) | _input_template(config) | _trackers(config))
    resolved = dotted.replace(resolved, _accumulation(resolved))
    _check_accumulation(resolved)
    _check_vision_lr(config.optim, config.adam.vision_lr, prefix="")
    _check_aux_loss(config.model, prefix="model.")
    check_ulysses(config.ds, packs=config.ds.packing_samples, needs="--ds.packing_samples", gpus={})
    return resolved


def _refuse_what_is_not_there_yet(config: PPOConfig | SFTConfig) -> None:
    known = dotted.leaf_types(type(config))
    for flag, refused in NOT_YET.items():
        if flag in known and (value := dotted.get(config, flag)) in refused:
            given = f"--{flag}" if value is True else f"--{flag} {value}"
            raise UserError(f"{given} is not available in this version; {INSTEAD.get(flag, 'leave it out')}")


def _require(config: PPOConfig | SFTConfig, flag: str, *, example: str) -> None:
    if not dotted.get(config, flag):
        raise UserError(f"--{flag} is missing; give for example --{flag} {example}")


def _low_high(config: PPOConfig) -> tuple[float, float]:
    match config.algo.advantage.is_correction_threshold:
        case (high,):
            return (0.0, high)
        case (low, high):
            return (low, high)
        case values:
            given = " ".join(map(str, values))
            raise UserError(f"--algo.advantage.is_correction_threshold takes HIGH or LOW HIGH, not {given!r}")


def _gamma(config: PPOConfig) -> dict[str, object]:
    """Return no discount for estimators that compare whole responses, as OpenRLHF does."""
    advantage = config.algo.advantage
    if advantage.estimator in ("gae", "reinforce") or advantage.gamma == 1.0:
        return {}
    logger.warning(
        "--algo.advantage.gamma %g is not used: %s compares whole responses", advantage.gamma, advantage.estimator
    )
    return {"algo.advantage.gamma": 1.0}


def _accumulation(config: PPOConfig | SFTConfig) -> dict[str, object]:
    """Return the precision of the weights for gradients without ZeRO, where DeepSpeed knows no other."""
    given, weights = config.ds.grad_accum_dtype, config.ds.param_dtype
    if config.ds.zero_stage > 0 or weights == given:
        return {}
    logger.warning("--ds.grad_accum_dtype %s is %s: with --ds.zero_stage 0 DeepSpeed knows no other", given, weights)
    return {"ds.grad_accum_dtype": weights}


def _check_accumulation(config: PPOConfig | SFTConfig) -> None:
    given, weights = config.ds.grad_accum_dtype, config.ds.param_dtype
    if given not in ("fp32", weights):
        raise UserError(
            f"--ds.grad_accum_dtype {given} with --ds.param_dtype {weights}: gradients are added up in fp32 or in the "
            "precision of the weights"
        )


def _check_vision_lr(optim: str, vision_lr: float | None, *, prefix: str) -> None:
    if vision_lr is None:
        return
    if vision_lr < 0:
        raise UserError(f"--{prefix}adam.vision_lr {vision_lr:g} must not be negative")
    if optim != "adam":
        raise UserError(
            f"--{prefix}adam.vision_lr {vision_lr:g} needs --{prefix}optim adam: DeepSpeed's Muon makes its own groups"
        )


def _check_aux_loss(model: ActorConfig | ModelConfig, *, prefix: str) -> None:
    flag = f"--{prefix}aux_loss_coef {model.aux_loss_coef:g}"
    if model.aux_loss_coef < 0:
        raise UserError(f"{flag} must not be negative")
    if model.aux_loss_coef and model.gradient_checkpointing_enable and model.gradient_checkpointing_reentrant:
        raise UserError(
            f"{flag}: with --{prefix}gradient_checkpointing_reentrant no gradient of the load-balancing loss reaches the "
            "routers; leave one out"
        )


def _param_dtype(config: PPOConfig | SFTConfig) -> dict[str, object]:
    flag = "ds.param_dtype"
    if dotted.get(config, flag) is not None:
        return {}
    return {flag: default_param_dtype(flag=flag, uses_ray=isinstance(config, PPOConfig))}


def _input_template(config: PPOConfig | SFTConfig) -> dict[str, object]:
    template = config.data.input_template
    if template and "{}" not in template:
        logger.warning("--data.input_template %r has no {} for the prompt and is not used", template)
        return {"data.input_template": None}
    return {}


def _trackers(config: PPOConfig | SFTConfig) -> dict[str, object]:
    """Return the trackers that are asked for by name or, as in OpenRLHF, by a setting without which they are off."""
    logger = config.logger
    asked = {
        "tensorboard": logger.tensorboard_dir,
        "wandb": logger.wandb.key,
        "swanlab": logger.swanlab.key,
        "mlflow": logger.mlflow.tracking_uri,
    }
    if asked["mlflow"] and urlsplit(asked["mlflow"]).password:
        raise UserError(
            "--logger.mlflow.tracking_uri holds a password, which would be written to the run folder; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        )
    names = typing.get_args(TrackerName)
    return {"logger.trackers": tuple(name for name in names if name in logger.trackers or asked[name])}


def _refuse_agents(config: PPOConfig) -> None:
    if config.train.agent_func_path:
        raise UserError(
            f"--train.agent_func_path {config.train.agent_func_path} is not available in this version; "
            "give --reward.remote_url"
        )


def _check_groups(config: PPOConfig) -> None:
    samples = config.rollout.n_samples_per_prompt
    estimator = config.algo.advantage.estimator
    if samples < 2 and estimator in GROUP_ESTIMATORS:
        raise UserError(
            f"--algo.advantage.estimator {estimator} compares the responses to one prompt: "
            f"--rollout.n_samples_per_prompt {samples} must be at least 2"
        )
    if not config.algo.dynamic_filtering_enable:
        return
    low, high = config.algo.dynamic_filtering_range
    if low >= high:
        raise UserError(f"--algo.dynamic_filtering_range {low} {high}: the first must be below the second")
    if samples < 2:
        raise UserError(
            f"--algo.dynamic_filtering_enable looks at a group's mean reward: "
            f"--rollout.n_samples_per_prompt {samples} must be at least 2"
        )


def _check_gpus(config: PPOConfig) -> None:
    actor, ref, train, vllm = config.actor, config.ref, config.train, config.vllm
    if vllm.num_engines < 1:
        raise UserError(f"--vllm.num_engines {vllm.num_engines}: at least one engine must generate")
    gpus = actor.num_nodes * actor.num_gpus_per_node
    shared = "--train.colocate_all" if train.colocate_all else "--train.colocate_actor_ref"
    if (train.colocate_all or train.colocate_actor_ref) and config.algo.kl.init_coef > 0:
        for name in ("num_nodes", "num_gpus_per_node"):
            ours, theirs = getattr(actor, name), getattr(ref, name)
            if ours != theirs:
                raise UserError(f"with {shared}, --actor.{name} {ours} and --ref.{name} {theirs} must be equal")
    engine_gpus = vllm.num_engines * vllm.tensor_parallel_size
    if train.colocate_all and gpus != engine_gpus:
        raise UserError(
            f"with --train.colocate_all the engines take the policy's GPUs: --actor.num_nodes {actor.num_nodes} x "
            f"--actor.num_gpus_per_node {actor.num_gpus_per_node} = {gpus}, but --vllm.num_engines "
            f"{vllm.num_engines} x --vllm.tensor_parallel_size {vllm.tensor_parallel_size} = {engine_gpus}"
        )


def _check_batches(config: PPOConfig) -> None:
    rollout, train = config.rollout, config.train
    for flag in (
        "rollout.micro_batch_size",
        "rollout.max_tokens_per_gpu",
        "train.batch_size",
        "train.micro_batch_size",
        "train.max_tokens_per_gpu",
    ):
        value = dotted.get(config, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag} {value} must be at least 1")
    if rollout.vllm_generate_batch_size > rollout.batch_size:
        raise UserError(
            f"--rollout.vllm_generate_batch_size {rollout.vllm_generate_batch_size} must not be above "
            f"--rollout.batch_size {rollout.batch_size}"
        )
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    given = (
        f"--rollout.batch_size {rollout.batch_size} x --rollout.n_samples_per_prompt {rollout.n_samples_per_prompt}"
    )
    shared = config.ds.tensor_parallel_size * config.ds.ulysses_size
    for name, gpus in _gpus(config).items():
        if gpus % config.ds.tensor_parallel_size:
            raise UserError(
                f"--ds.tensor_parallel_size {config.ds.tensor_parallel_size} does not divide the {gpus} GPUs of "
                f"--{name}.num_nodes x --{name}.num_gpus_per_node; take a number that does"
            )
        # Or groups of processes that get the same samples.
        processes = gpus // shared
        if samples % processes:
            raise UserError(f"{given} must be a multiple of the {processes} {name} processes")
        if name in ("actor", "critic") and train.batch_size % processes:
            raise UserError(
                f"--train.batch_size {train.batch_size} must be a multiple of the {processes} {name} processes"
            )
    if samples < train.batch_size:
        raise UserError(
            f"--train.batch_size {train.batch_size} is more than the {samples} samples of a rollout ({given}), so no "
            "step would update the weights"
        )


def _check_ulysses(config: PPOConfig) -> None:
    packs = config.ds.packing_samples or (
        config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1
    )
    check_ulysses(config.ds, packs=packs, needs="--ds.packing_samples", gpus=_gpus(config))


def _gpus(config: PPOConfig) -> dict[str, int]:
    """Return how many GPUs each model of a run has."""
    groups = {"actor": config.actor}
    if config.algo.kl.init_coef > 0:
        groups["ref"] = config.ref
    for name in ("critic", "reward"):
        if getattr(config, name).model_name_or_path:
            groups[name] = getattr(config, name)
    return {name: group.num_nodes * group.num_gpus_per_node for name, group in groups.items()}


def _check_kl(config: PPOConfig) -> None:
    kl = config.algo.kl
    if kl.use_loss and kl.estimator == "k1" and not kl.unbiased_gradient:
        logger.warning(
            "--algo.kl.estimator k1 has no useful gradient as a loss; take k2 or k3 with --algo.kl.use_loss"
        )
    if not kl.use_loss and kl.estimator != "k1":
        logger.warning("--algo.kl.estimator %s is meant for --algo.kl.use_loss; take k1 in the reward", kl.estimator)
