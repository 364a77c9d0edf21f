"""Checks of a model's adapters and optimizer, of the RL algorithm, asynchronous runs and group filters."""

from __future__ import annotations

from lmm_r1.config.ppo import CLIP_RANGES, ActorConfig, AdvantageConfig, PPOConfig
from lmm_r1.config.shared import DeepSpeedConfig, OptimizerConfig
from lmm_r1.errors import UserError

EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
_FLAG = "--ds.load_in_4bit"


def check_adapters(ds: DeepSpeedConfig) -> None:
    """Raise UserError for kinds of adapters or 4 bits without adapters, and for settings that exclude 4 bits."""
    if not ds.load_in_4bit:
        return
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
    if config.refers_to_base:
        return "with --ds.lora.rank the reference is the policy without its adapters, and no second model is loaded"
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
    if steps == 0:
        return
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
        return
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
# Final learning rate of transformers' polynomial schedule, which must be below the peak.
_POLYNOMIAL_END = 1e-7


def check_schedule(model: OptimizerConfig, *, prefix: str) -> None:
    """Raise UserError for a learning-rate schedule that does not exist, or that would rise."""
    flag = f"--{prefix}lr_scheduler {model.lr_scheduler}"
    if model.lr_scheduler not in SCHEDULES:
        raise UserError(f"{flag} is not one of {', '.join(SCHEDULES)}")
    rate = model.adam.lr
    # It is open for a critic that the run does not have.
    if model.lr_scheduler == "polynomial" and rate is not None and rate <= _POLYNOMIAL_END:
        raise UserError(
            f"{flag} ends at {_POLYNOMIAL_END:g}, which --{prefix}adam.lr {rate:g} must be above; take linear"
        )


CONSTANT = "seq-mean-token-sum-norm"
# Losses with one ratio per sequence.
_OF_SEQUENCES = ("gspo", "gspo_token")


def check_algorithm(config: PPOConfig) -> None:
    """Raise UserError for the first contradiction in a config in which every value is filled in."""
    _check_policy_loss(config.actor)
    _check_aggregation(config.actor)
    _check_correction(config.algo.advantage)
    _check_pass_k(config)
    _check_remax(config)


def _check_policy_loss(actor: ActorConfig) -> None:
    low_high = actor.eps_clip_low_high
    assert low_high is not None, "resolve_ppo fills it in"
    if actor.policy_loss_type == "sapo" and low_high != CLIP_RANGES["sapo"]:
        raise UserError(
            f"--actor.eps_clip_low_high {low_high[0]:g} {low_high[1]:g} has no part in --actor.policy_loss_type sapo, which "
            "clips nothing; leave it out, and see --actor.sapo_temperature_pos"
        )


def _check_aggregation(actor: ActorConfig) -> None:
    if actor.loss_agg_mode == CONSTANT and actor.policy_loss_type in _OF_SEQUENCES:
        raise UserError(
            f"--actor.loss_agg_mode {CONSTANT} sums over tokens, and --actor.policy_loss_type {actor.policy_loss_type} has "
            "one ratio for all tokens of a sequence; take seq-mean-token-mean"
        )


def _check_correction(advantage: AdvantageConfig) -> None:
    if advantage.is_correction_level == "off":
        return
    prefix, gating = "--algo.advantage.is_correction", advantage.is_correction_gating
    if gating == "ratio":
        return
    if advantage.is_correction_mode == "clip":
        raise UserError(
            f"{prefix}_mode clip and {prefix}_gating {gating}: a ratio can be held at a bound, a divergence is none; take "
            "mask"
        )
    if advantage.is_correction_threshold[0] > 0:
        raise UserError(f"{prefix}_gating {gating} has only an upper bound; give one number as {prefix}_threshold")


def _check_pass_k(config: PPOConfig) -> None:
    k, estimator = config.algo.advantage.pass_k, config.algo.advantage.estimator
    samples = config.rollout.n_samples_per_prompt
    if estimator == "grpo_passk" and samples <= k:
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
    """Raise UserError for settings that contradict `--train.async_enable`."""
    train = config.train
    if not train.async_enable:
        return
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
    """Raise UserError for settings that contradict `--rollout.oversample`; the batch may be open."""
    rollout = config.rollout
    given = f"--rollout.oversample {rollout.oversample:g}"
    if rollout.oversample == 1:
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
    if algo.dynamic_filtering_enable and samples < 2:
        raise UserError(
            f"--algo.dynamic_filtering_enable looks at a group's mean reward: "
            f"--rollout.n_samples_per_prompt {samples} must be at least 2"
        )
