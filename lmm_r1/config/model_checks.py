"""Checks of a model's adapters and optimizer, of the RL algorithm, asynchronous runs and group filters."""

from __future__ import annotations

import math

from lmm_r1.config.ppo import ActorConfig, AdvantageConfig, AlgoConfig, PPOConfig, PPOTrainConfig, RolloutConfig
from lmm_r1.config.shared import DeepSpeedConfig, OptimizerConfig, check_least, check_positive
from lmm_r1.errors import UserError

EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
_FLAG = "--ds.load_in_4bit"


def check_adapters(ds: DeepSpeedConfig) -> None:
    """Raise UserError for kinds of adapters or 4 bits without adapters, and for settings that exclude 4 bits."""
    for name in ("use_dora", "use_rslora"):
        if getattr(ds.lora, name) and not ds.lora.rank:
            raise UserError(f"--ds.lora.{name} is a kind of LoRA; give --ds.lora.rank, too")
    if not ds.load_in_4bit:
        return
    if not ds.lora.rank:
        raise UserError(
            f"{_FLAG}: weights in 4 bits are not trained; give --ds.lora.rank for adapters on them, or leave it out"
        )
    if ds.zero_stage == 3:
        raise UserError(
            f"{_FLAG}: DeepSpeed cannot share weights in 4 bits out over GPUs; take --ds.zero_stage 2, with which each GPU "
            "has all of them in a quarter of the memory, or --ds.zero_stage 3 without 4 bits"
        )
    if ds.tensor_parallel_size > 1:
        raise UserError(
            f"{_FLAG} and --ds.tensor_parallel_size {ds.tensor_parallel_size}: a layer in 4 bits cannot be split; leave one "
            "out"
        )
    if ds.deepcompile:
        raise UserError(f"{_FLAG} and --ds.deepcompile: layers in 4 bits are not compiled; leave one out")
    if ds.use_universal_ckpt:
        raise UserError(
            f"{_FLAG} and --ds.use_universal_ckpt: universal checkpoints have no place for weights in 4 bits; resume on as "
            "many GPUs as before, without it"
        )


def check_image_cache(ds: DeepSpeedConfig) -> None:
    """Raise UserError for a negative amount of memory."""
    if ds.image_cache_gib < 0:
        raise UserError(f"--ds.image_cache_gib {ds.image_cache_gib:g} must be 0 or more; 0 keeps nothing")


def check_eight_bit(model: OptimizerConfig, ds: DeepSpeedConfig, *, prefix: str, sleeps: bool = False) -> None:
    """Raise UserError if other flags need optimizer states in 8 bits to be where they cannot be.

    Args:
        prefix: prefix of the optimizer's flags.
        sleeps: whether the trainer's states move to host memory during generation.
    """
    if model.optim not in EIGHT_BIT:
        return
    given = f"--{prefix}optim {model.optim}"
    if ds.adam_offload:
        raise UserError(
            f"{given} and --ds.adam_offload: DeepSpeed keeps only the state of its own AdamW in CPU memory; take "
            f"--{prefix}optim adam with it, or leave it out"
        )
    if ds.zero_stage == 0:
        raise UserError(f"{given} is for --ds.zero_stage 1, 2 and 3; take one of them, or --{prefix}optim adam")
    if sleeps and model.optim != "adamw_8bit":
        raise UserError(
            f"{given} and --ds.enable_sleep: DeepSpeed moves only the state of other optimizers to host memory; take "
            f"--{prefix}optim adamw_8bit with it, or leave it out"
        )


def why_not_during_generation(config: PPOConfig) -> str | None:
    """Return why the reference cannot compute log-probs during generation; None if it can."""
    if config.algo.kl.init_coef <= 0:
        return f"with --algo.kl.init_coef {config.algo.kl.init_coef:g} there is no reference model"
    if not config.train.async_enable:
        return None
    if config.train.colocate_all or config.train.colocate_actor_ref:
        return "with --train.async_enable the policy is updated during generation, on the GPUs of the reference"
    if config.ref.refresh_steps:
        return "with --train.async_enable and --ref.refresh_steps the next rollout begins before the reference is refreshed"
    return None


def check_reference(config: PPOConfig) -> None:
    """Raise UserError for a reference that cannot be refreshed, or cannot run during generation."""
    why = why_not_during_generation(config)
    if config.ref.during_generation and why is not None:
        raise UserError(f"--ref.during_generation: {why}; leave it out")
    steps = config.ref.refresh_steps
    given = f"--ref.refresh_steps {steps}"
    if steps < 0:
        raise UserError(f"{given} must be at least 1, or 0 for a reference that stays as it is")
    if steps == 0:
        return
    if config.algo.kl.init_coef <= 0:
        raise UserError(f"{given}: with --algo.kl.init_coef {config.algo.kl.init_coef:g} there is no reference model")
    if config.ds.load_in_4bit:
        raise UserError(f"{given}: with --ds.load_in_4bit the reference is in 4 bits, and takes no other weights")
    if config.ds.tensor_parallel_size > 1:
        raise UserError(
            f"{given}: with --ds.tensor_parallel_size {config.ds.tensor_parallel_size} no rank has the policy's weights whole; "
            "leave one out"
        )


def check_average(config: PPOConfig) -> None:
    """Raise UserError for settings of the moving average that are impossible or have no effect."""
    train = config.train
    if not train.enable_ema:
        if train.ema_beta != PPOTrainConfig.ema_beta:
            raise UserError(f"--train.ema_beta {train.ema_beta:g} has no part without --train.enable_ema; add it")
        return
    if not 0 < train.ema_beta < 1:
        raise UserError(f"--train.ema_beta {train.ema_beta:g} must be above 0 and below 1")
    if config.ds.zero_stage == 0:
        raise UserError(
            "--train.enable_ema averages the optimizer's weights in single precision, which --ds.zero_stage 0 does not keep; "
            "take 1, 2 or 3"
        )
    if config.ds.use_universal_ckpt:
        raise UserError("--train.enable_ema: a universal checkpoint (--ds.use_universal_ckpt) holds no moving average")


def check_fp16_optimizer(model: OptimizerConfig, ds: DeepSpeedConfig, *, prefix: str) -> None:
    """Raise UserError for an optimizer whose updates are wrong with scaled losses."""
    if ds.param_dtype == "fp16" and model.optim == "muon":
        raise UserError(
            f"--{prefix}optim muon with --ds.param_dtype fp16: DeepSpeed divides Muon's updates, which have the length of no "
            f"gradient, by the scale of the loss; take --ds.param_dtype bf16, or --{prefix}optim adam"
        )


SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "polynomial",
)
"""Names of transformers' schedules that need only the number of updates."""
_SCHEDULES_WITH_END = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
# Final learning rate of transformers' polynomial schedule, which must be below the peak.
_POLYNOMIAL_END = 1e-7


def check_optimizer(model: OptimizerConfig, *, prefix: str) -> None:
    """Raise UserError for settings of the optimizer or its schedule that have no effect, or no meaning."""
    check_least(model, "muon.ns_steps", prefix=f"--{prefix}")
    check_least(model, "adam.lr", "muon.lr", least=0, prefix=f"--{prefix}")
    _check_schedule(model, prefix=prefix)


def _check_schedule(model: OptimizerConfig, *, prefix: str) -> None:
    flag = f"--{prefix}lr_scheduler {model.lr_scheduler}"
    if model.lr_scheduler not in SCHEDULES:
        raise UserError(f"{flag} is not one of {', '.join(SCHEDULES)}")
    if not 0 <= model.lr_warmup_ratio <= 1:
        raise UserError(f"--{prefix}lr_warmup_ratio {model.lr_warmup_ratio:g} must be between 0 and 1")
    if model.min_lr_ratio != OptimizerConfig.min_lr_ratio and model.lr_scheduler not in _SCHEDULES_WITH_END:
        raise UserError(
            f"--{prefix}min_lr_ratio {model.min_lr_ratio:g} has no part in {flag}; "
            f"take {' or '.join(_SCHEDULES_WITH_END)}, or leave it out"
        )
    if model.lr_scheduler == "polynomial" and model.adam.lr <= _POLYNOMIAL_END:
        raise UserError(
            f"{flag} ends at {_POLYNOMIAL_END:g}, which --{prefix}adam.lr {model.adam.lr:g} must be above; take linear"
        )


def check_vision_lr(optim: str, vision_lr: float | None, *, prefix: str) -> None:
    """Raise UserError for a learning rate of the vision tower that has no effect."""
    if vision_lr is None:
        return
    if vision_lr < 0:
        raise UserError(f"--{prefix}adam.vision_lr {vision_lr:g} must not be negative")
    if optim == "muon":
        raise UserError(
            f"--{prefix}adam.vision_lr {vision_lr:g} needs --{prefix}optim adam: DeepSpeed's Muon makes its own groups"
        )


CONSTANT = "seq-mean-token-sum-norm"
# Losses with one ratio per sequence.
_OF_SEQUENCES = ("gspo", "gspo_token")
# Losses that clip ratios on both sides, which a dual clip bounds further.
_CLIPPED = ("ppo", *_OF_SEQUENCES)


def check_algorithm(config: PPOConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    _check_temperature(config.rollout.temperature)
    _check_policy_loss(config.actor)
    _check_aggregation(config.actor)
    _check_correction(config.algo.advantage)
    _check_pass_k(config)
    _check_remax(config)


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise UserError(
            f"--rollout.temperature {temperature:g} must be above 0: the policy gradient needs sampled responses, and "
            "greedy ones to a prompt are all equal; evaluations have --eval.temperature"
        )


def _check_policy_loss(actor: ActorConfig) -> None:
    loss = actor.policy_loss_type
    assert actor.eps_clip_low_high is not None, "resolve_ppo fills it in"
    if min(actor.eps_clip_low_high) < 0:
        low, high = actor.eps_clip_low_high
        raise UserError(
            f"--actor.eps_clip_low_high {low:g} {high:g}: how far a ratio may leave 1 must not be negative"
        )
    if loss == "sapo":
        both = (ActorConfig.eps_clip, ActorConfig.eps_clip)
        if actor.eps_clip_low_high != both or actor.dual_clip is not None:
            flag = "dual_clip" if actor.dual_clip is not None else "eps_clip, or --actor.eps_clip_low_high,"
            raise UserError(
                f"--actor.{flag} has no part in --actor.policy_loss_type sapo, which clips nothing; leave it out, and see "
                "--actor.sapo_temperature_pos"
            )
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        check_positive(actor, name, prefix="--actor.")
        value = getattr(actor, name)
        if value != getattr(ActorConfig, name) and loss != "sapo":
            raise UserError(f"--actor.{name} {value:g} has no part in --actor.policy_loss_type {loss}; leave it out")
    if actor.dual_clip is None:
        return
    if loss not in _CLIPPED:
        raise UserError(
            f"--actor.dual_clip {actor.dual_clip:g} has no part in --actor.policy_loss_type {loss}; leave it out"
        )
    if not actor.dual_clip > 1:
        raise UserError(f"--actor.dual_clip {actor.dual_clip:g} must be above 1")


def _check_aggregation(actor: ActorConfig) -> None:
    length, mode = actor.loss_agg_length, actor.loss_agg_mode
    if mode != CONSTANT:
        if length is not None:
            raise UserError(
                f"--actor.loss_agg_length {length} has no part in --actor.loss_agg_mode {mode}; take {CONSTANT}, or leave "
                "it out"
            )
        return
    if actor.policy_loss_type in _OF_SEQUENCES:
        raise UserError(
            f"--actor.loss_agg_mode {CONSTANT} sums over tokens, and --actor.policy_loss_type {actor.policy_loss_type} has "
            "one ratio for all tokens of a sequence; take seq-mean-token-mean"
        )
    check_least(actor, "loss_agg_length", prefix="--actor.")


def _check_correction(advantage: AdvantageConfig) -> None:
    if advantage.is_correction_level == "off":
        return
    prefix, gating = "--algo.advantage.is_correction", advantage.is_correction_gating
    low, high = advantage.is_correction_threshold
    if low > high:
        raise UserError(f"{prefix}_threshold {low:g} {high:g}: the first must not be above the second")
    if gating == "ratio":
        return
    if advantage.is_correction_mode == "clip":
        raise UserError(
            f"{prefix}_mode clip and {prefix}_gating {gating}: a ratio can be held at a bound, a divergence is none; take "
            "mask"
        )
    if low > 0:
        raise UserError(f"{prefix}_gating {gating} has only an upper bound; give one number as {prefix}_threshold")


def _check_pass_k(config: PPOConfig) -> None:
    k, estimator = config.algo.advantage.pass_k, config.algo.advantage.estimator
    samples = config.rollout.n_samples_per_prompt
    if estimator != "grpo_passk":
        if k != AdvantageConfig.pass_k:
            raise UserError(f"--algo.advantage.pass_k {k} is for --algo.advantage.estimator grpo_passk; leave it out")
        return
    check_least(config, "algo.advantage.pass_k")
    if samples <= k:
        raise UserError(
            f"--algo.advantage.estimator grpo_passk compares sets of --algo.advantage.pass_k {k} responses: "
            f"--rollout.n_samples_per_prompt {samples} must be more, as there is one set otherwise"
        )


def _check_remax(config: PPOConfig) -> None:
    if config.algo.advantage.estimator != "remax":
        return
    given = "--algo.advantage.estimator remax"
    if config.reward.model_name_or_path:
        raise UserError(
            f"{given} needs the reward of a greedy response to each prompt, and --reward.model_name_or_path "
            f"{config.reward.model_name_or_path} scores only what is trained on; serve it with lmm-r1 serve_rm and give its "
            "address as --reward.remote_url"
        )
    if config.train.agent_func_path:
        raise UserError(
            f"{given} needs greedy episodes, and the executor of --train.agent_func_path {config.train.agent_func_path} "
            "samples as it likes; write an environment and give --train.agent FILE.py:CLASS"
        )


def check_async(config: PPOConfig) -> None:
    """Raise UserError for settings that contradict `--train.async_enable`, or that need it."""
    train = config.train
    if not train.async_enable:
        if train.partial_rollout_enable:
            raise UserError(
                "--train.partial_rollout_enable lets responses run on while the policy is updated; give --train.async_enable, "
                "too"
            )
        if train.async_queue_size != PPOTrainConfig.async_queue_size:
            raise UserError(
                f"--train.async_queue_size {train.async_queue_size} bounds how far rollouts are made ahead of the update; "
                "give --train.async_enable, too"
            )
        return
    if train.async_queue_size < 1:
        raise UserError(
            f"--train.async_queue_size {train.async_queue_size} must be at least 1; without --train.async_enable no rollout "
            "is made ahead"
        )
    if train.colocate_all:
        raise UserError(
            "--train.async_enable generates and trains at the same time, and with --train.colocate_all engines and policy "
            "take turns on the same GPUs; leave one of them out"
        )
    if config.ds.enable_sleep:
        raise UserError(
            "--ds.enable_sleep frees the policy's memory while responses are generated, which is all the time with "
            "--train.async_enable; leave one of them out"
        )


def check_oversampling(config: PPOConfig) -> None:
    """Raise UserError for settings that contradict `--rollout.oversample`, or that need it; the batch may be open."""
    rollout = config.rollout
    given, held = f"--rollout.oversample {rollout.oversample:g}", rollout.oversample_max_held
    if not 1 <= rollout.oversample <= 2:
        raise UserError(
            f"{given} must be between 1, with which every rollout waits for all of its groups, and 2: of more, those that are held "
            "over would not all find room in the next step"
        )
    check_least(config, "rollout.oversample_max_held")
    if rollout.oversample == 1:
        if held != RolloutConfig.oversample_max_held:
            raise UserError(
                f"--rollout.oversample_max_held {held} bounds how long groups are held over; give --rollout.oversample, too"
            )
        return
    if config.train.async_enable:
        raise UserError(
            f"{given} holds groups over while the policy is updated, and --train.async_enable generates on, with ages that "
            "--train.async_queue_size bounds for whole rollouts; leave one of them out"
        )
    limit = rollout.vllm_generate_batch_size
    # A size that is still open may be any.
    if limit is not None and (not rollout.batch_size or limit < rollout.batch_size):
        raise UserError(
            f"{given} lets the engines have more prompts than a step has, and --rollout.vllm_generate_batch_size {limit} "
            "fewer; leave one of them out"
        )


def check_filters(config: PPOConfig) -> None:
    """Raise UserError for group filters that would drop nothing or everything, and for a curriculum without measurements."""
    curriculum, episodes = config.data.curriculum, config.train.num_episodes
    if curriculum != "off" and episodes < 2:
        raise UserError(
            f"--data.curriculum {curriculum} orders prompts by what the episodes before have measured: "
            f"--train.num_episodes {episodes} must be at least 2"
        )
    algo, samples = config.algo, config.rollout.n_samples_per_prompt
    if algo.dynamic_filtering_max_batches < 0:
        raise UserError(
            f"--algo.dynamic_filtering_max_batches {algo.dynamic_filtering_max_batches} must be at least 1, or 0 for no bound"
        )
    if not algo.dynamic_filtering_enable:
        names = ["part", "min_std"] + ([] if algo.experience_filter else ["max_batches"])
        for name in [f"dynamic_filtering_{name}" for name in names]:
            if (value := getattr(algo, name)) != getattr(AlgoConfig, name):
                raise UserError(f"--algo.{name} {value} has no part without --algo.dynamic_filtering_enable; add it")
        return
    low, high = algo.dynamic_filtering_range
    # This also refuses NaN.
    if not low < high:
        raise UserError(f"--algo.dynamic_filtering_range {low} {high}: the first must be below the second")
    least = algo.dynamic_filtering_min_std
    if least is not None and not (0 < least < math.inf):
        raise UserError(f"--algo.dynamic_filtering_min_std {least:g} must be above 0; leave it out for no bound")
    if samples < 2:
        raise UserError(
            f"--algo.dynamic_filtering_enable looks at a group's mean reward: "
            f"--rollout.n_samples_per_prompt {samples} must be at least 2"
        )
