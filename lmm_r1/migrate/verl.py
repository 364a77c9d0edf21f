"""Conversion of verl's settings (`actor_rollout_ref`), including those of Mini-o3 and of several turns.

EasyR1 is based on verl, so its rules are used: settings get EasyR1's names and verl's defaults.
"""

from __future__ import annotations

import math

from lmm_r1.config.ppo import CONSTANT
from lmm_r1.migrate.easyr1 import EASYR1, KL_ESTIMATORS, LOSS_MEANS, kl_estimator, most_batches
from lmm_r1.migrate.table import (
    Flag,
    Given,
    Results,
    Table,
    derived,
    differs,
    lacks,
    names_of,
    settings_of,
)
from lmm_r1.migrate.verl_turns import ACTOR, IMAGES, IN_PLACE, ROLLOUT, TURN_RULES, crops

_GRADIENTS = f"{ACTOR}.fsdp_config.grad_offload"
"""Only verl before 0.3 has it, in which KL is in the reward unless it is a loss."""
_MULTIPLIER = "trainer.rejection_sample_multiplier"
_REJECTION, _FILTER = "trainer.rejection_sample", "algorithm.filter_groups.enable"
# The switches of Mini-o3 and DAPO that draw groups again, each with its bound on the batches of a step.
_BOUNDS = {_REJECTION: "algorithm.max_num_gen_batches", _FILTER: "algorithm.filter_groups.max_num_gen_batches"}
_METRIC = "algorithm.filter_groups.metric"
_RIGHT = "acc"
"""The only metric of DAPO's filter that does not name a reward."""
_LEAST_STD = {_REJECTION: 1e-4, _FILTER: 1e-6}
_OVERLONG = "reward_model.overlong_buffer"
_PROMPT = "data.system_prompt"
_TOKENWISE = f"{ACTOR}.use_token_level_loss"


def _kl(given: Given) -> Results:
    """Convert the KL penalty: in verl it is a loss, part of the reward, or absent, which is the default."""
    name, as_loss = "algorithm.use_kl_in_reward", given.switch("algorithm.use_kl_loss")
    if as_loss:
        if given[name]:
            text = "KL is either a loss or part of the reward; algorithm.use_kl_loss selects the loss, so set only one of them"
            yield lacks(name, text)
    elif given[name] or (not given.has(name) and given.has(_GRADIENTS)):
        yield from kl_estimator(given, "algorithm.kl_penalty_in_reward", other="k1")
        coefficient = given["algorithm.kl_ctrl.kl_coef"]
        yield Flag("algo.kl.init_coef", 0.001 if coefficient is None else given.number("algorithm.kl_ctrl.kl_coef"))
    else:
        yield Flag("algo.kl.init_coef", 0.0)
        yield Flag("algo.kl.estimator", KL_ESTIMATORS["kl"])
        yield derived("algorithm.use_kl_loss", f"KL is off unless it or {name} is set")


def _sampling(given: Given) -> Results:
    """Convert the sampling of validation, which is one greedy response by default in verl."""
    if given.has(IMAGES) and not crops(given):
        yield Flag("data.max_images_per_prompt", given.group(IMAGES).get("image", 0))
    if not given["data.val_files"]:
        return
    own, *kept_tokens = (f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k"))
    yield Flag("eval.n_samples_per_prompt", given.whole(f"{ROLLOUT}.val_n") if given.has(f"{ROLLOUT}.val_n") else 1)
    yield Flag("eval.temperature", 0.0)
    if given[f"{ROLLOUT}.val_do_sample"]:
        yield Flag("eval.temperature", given.number("worker.rollout.temperature" if given[own] is None else own))
    for setting, everything in zip(kept_tokens, (1.0, -1), strict=True):
        if given[setting] not in (None, everything):
            yield Flag(f"eval.{setting.rpartition('.')[2]}", given[setting])


def _rows(given: Given) -> Results:
    """Name the columns: verl's rows have `prompt` and `reward_model`, Mini-o3's `problem` and `solution`."""
    prompt, answer = ("problem", "solution") if crops(given) else ("prompt", "reward_model.ground_truth")
    yield Flag("data.input_key", given["data.prompt_key"] if given.has("data.prompt_key") else prompt)
    yield Flag("data.label_key", given["data.answer_key"] if given.has("data.answer_key") else answer)
    # Tokens of a dynamic batch, which replace the micro-batch size in verl.
    for setting, flag in (
        (f"{ACTOR}.ppo_max_token_len_per_gpu", "train.max_tokens_per_gpu"),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", "rollout.max_tokens_per_gpu"),
    ):
        if given.switch("worker.actor.dynamic_batching") and given[setting] is not None:
            yield Flag(flag, given.whole(setting))
    if given[f"{_OVERLONG}.enable"]:
        factor = f"{_OVERLONG}.penalty_factor"
        yield Flag("reward.overlong_buffer_len", given.whole(f"{_OVERLONG}.len"))
        yield Flag("reward.overlong_penalty_factor", 1.0 if given[factor] is None else given.number(factor))
    mode = given.text("trainer.resume_mode")
    if mode == "disable":
        yield Flag("ckpt.load_enable", False)
    elif mode == "resume_path":
        yield lacks("trainer.resume_mode", "verl's checkpoints cannot be read; merge one into a model")


def _rejection(given: Given) -> Results:
    """Convert dynamic sampling: groups with equal rewards are replaced until the step is full or reaches its bound."""
    for switch, bound in _BOUNDS.items():
        if not given[switch]:
            continue
        yield Flag("algo.dynamic_filtering_enable", True)
        if switch == _FILTER and given[_METRIC] == _RIGHT:
            yield Flag("algo.dynamic_filtering_range", [0.0, 1.0])
            text = (
                "a group is kept if its mean score is strictly between 0 and 1; --algo.dynamic_filtering_part selects"
            )
            yield differs(_METRIC, f"{text} a part of the reward")
        else:
            yield Flag("algo.dynamic_filtering_range", [-math.inf, math.inf])
            yield Flag("algo.dynamic_filtering_min_std", _LEAST_STD[switch])
        if switch == _REJECTION:
            yield differs(switch, "here the run stops if a judge fails; Mini-o3 drops the group")
        multiplier = given.number(_MULTIPLIER) if given.has(_MULTIPLIER) else 1.0
        if multiplier != 1.0:
            yield differs(_MULTIPLIER, "a step draws as many prompts as it still needs")
        if given[bound] is not None:
            yield Flag("algo.dynamic_filtering_max_batches", most_batches(given, bound, multiplier=multiplier))


def _policy(given: Given) -> Results:
    """Convert the loss; Dr. GRPO does not divide advantages by the standard deviation of the group."""
    if given[_TOKENWISE] is not None:
        yield Flag("actor.loss_agg_mode", LOSS_MEANS["token" if given.switch(_TOKENWISE) else "seq"])
    mean, known = given.text(f"{ACTOR}.loss_agg_mode"), (*LOSS_MEANS.values(), CONSTANT)
    if mean == "seq-mean-token-sum":
        yield Flag("actor.loss_agg_mode", CONSTANT)
        yield Flag("actor.loss_agg_length", 1)
    elif mean in known:
        yield Flag("actor.loss_agg_mode", mean)
        if mean == CONSTANT and given[f"{ACTOR}.loss_scale_factor"] is not None:
            yield Flag("actor.loss_agg_length", given.whole(f"{ACTOR}.loss_scale_factor"))
    elif mean is not None:
        text = f"{mean} is unknown, and token-mean replaces it; known are {', '.join(known)}"
        yield lacks(f"{ACTOR}.loss_agg_mode", text)
    divides = "algorithm.norm_adv_by_std_in_grpo"
    if given.text("algorithm.adv_estimator") == "grpo" and given.has(divides) and not given.switch(divides):
        yield Flag("algo.advantage.estimator", "dr_grpo")
    if given[f"{ACTOR}.entropy_coeff"]:
        yield Flag("actor.entropy_coef", given.number(f"{ACTOR}.entropy_coeff"))
    if given.text("worker.actor.loss_type") != "sapo" and given[f"{ACTOR}.clip_ratio"] is not None:
        both = given.number(f"{ACTOR}.clip_ratio")
        sides = [f"worker.actor.clip_ratio_{side}" for side in ("low", "high")]
        yield Flag("actor.eps_clip_low_high", [given.number(side) if given.has(side) else both for side in sides])


_DEFAULTS = names_of("verl_defaults")

VERL = Table(
    system="verl",
    command="train_ppo_ray",
    # A system prompt is text there, and a name here. If several rules set a flag, the last one wins.
    settings=(
        *(
            one._replace(default=_DEFAULTS.get(one.name, one.default))
            for one in EASYR1.settings
            if one.name != _PROMPT
        ),
        *settings_of("verl"),
    ),
    rules=(
        *(IN_PLACE.get(rule, rule) for rule in EASYR1.rules),
        _kl,
        _sampling,
        _rows,
        _rejection,
        _policy,
        *TURN_RULES,
    ),
    names=names_of("verl_names"),
    families=names_of("verl_families"),
)
