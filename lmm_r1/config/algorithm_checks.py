"""Checks of the settings of the RL algorithm, of asynchronous runs and of group filters."""

from __future__ import annotations

import math

from lmm_r1.config.ppo import ActorConfig, AdvantageConfig, AlgoConfig, PPOConfig, PPOTrainConfig, RolloutConfig
from lmm_r1.errors import UserError

CONSTANT = "seq-mean-token-sum-norm"
# Losses whose ratio is that of a sequence.
_OF_SEQUENCES = ("gspo", "gspo_token")
# Losses that hold ratios between bounds on both sides of an objective, which a dual clip bounds further.
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
        value = getattr(actor, name)
        if not value > 0:
            raise UserError(f"--actor.{name} {value:g} must be above 0")
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
    assert length is not None, "resolve_ppo fills it in"
    if length < 1:
        raise UserError(f"--actor.loss_agg_length {length} must be at least 1")


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
        raise UserError(f"{prefix}_gating {gating} has an upper bound alone; give one number as {prefix}_threshold")


def _check_pass_k(config: PPOConfig) -> None:
    k, estimator = config.algo.advantage.pass_k, config.algo.advantage.estimator
    samples = config.rollout.n_samples_per_prompt
    if estimator != "grpo_passk":
        if k != AdvantageConfig.pass_k:
            raise UserError(f"--algo.advantage.pass_k {k} is for --algo.advantage.estimator grpo_passk; leave it out")
        return
    if k < 1:
        raise UserError(f"--algo.advantage.pass_k {k} must be at least 1")
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
            f"{given} must be between 1, where every rollout waits for all of its groups, and 2: of more, those that are held "
            "over would not all find room in the next step"
        )
    if held < 1:
        raise UserError(f"--rollout.oversample_max_held {held} must be at least 1")
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
    # A size that is open yet may be any.
    if limit is not None and (not rollout.batch_size or limit < rollout.batch_size):
        raise UserError(
            f"{given} lets the engines have more prompts than a step has, and --rollout.vllm_generate_batch_size {limit} "
            "fewer; leave one of them out"
        )


def check_filters(config: PPOConfig) -> None:
    """Raise UserError for filters of groups that could drop nothing, or everything, and for a curriculum of nothing."""
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
    # Of what is no number, too, nothing would be left.
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
