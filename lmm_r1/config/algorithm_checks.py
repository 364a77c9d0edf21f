"""Which flags of estimators, policy losses and the mismatch's correction contradict each other, or would have no effect."""

import math

from lmm_r1.config.ppo import ActorConfig, AdvantageConfig, PPOConfig
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
