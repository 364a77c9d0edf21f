"""Conversion of verl's settings (`actor_rollout_ref`), including those of Mini-o3 and of several turns.

EasyR1 is based on verl, so its rules are used: settings get EasyR1's names and verl's defaults.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lmm_r1.config.model_checks import CONSTANT
from lmm_r1.migrate.easyr1 import EASYR1, KL_ESTIMATORS, LOSS_MEANS, kl_estimator, most_batches
from lmm_r1.migrate.table import (
    Flag,
    Given,
    Results,
    Table,
    derived,
    differs,
    idle,
    lacks,
    names_of,
    settings_of,
    trackers,
)
from lmm_r1.migrate.verl_rules import (
    ACTOR,
    IMAGES,
    IN_PLACE,
    REWARD_RULES,
    REWARD_SETTINGS,
    ROLLOUT,
    TURN_RULES,
    TURN_SETTINGS,
    crops,
)

_GRADIENTS = f"{ACTOR}.fsdp_config.grad_offload"
"""Only verl before 0.3 has it, in which KL is in the reward unless it is a loss."""
_MULTIPLIER = "trainer.rejection_sample_multiplier"
_REJECTION, _FILTER = "trainer.rejection_sample", "algorithm.filter_groups.enable"
# The switches of Mini-o3 and DAPO that draw groups again, each with its bound on the batches of a step.
_BOUNDS = {_REJECTION: "algorithm.max_num_gen_batches", _FILTER: "algorithm.filter_groups.max_num_gen_batches"}
_METRIC = "algorithm.filter_groups.metric"
_RIGHT = "acc"
"""The only metric of DAPO's filter that does not name a reward."""
_MINI_O3_LEAST_STD, _LEAST_STD = 1e-4, 1e-6
_OVERLONG = tuple(f"reward_model.overlong_buffer.{what}" for what in ("enable", "len", "penalty_factor"))
_TOKENWISE = f"{ACTOR}.use_token_level_loss"


def _kl(given: Given) -> Results:
    """Convert the KL penalty: in verl it is a loss, part of the reward, or absent, which is the default."""
    in_reward = given["algorithm.use_kl_in_reward"]
    if not given.has("algorithm.use_kl_in_reward") and given.has(_GRADIENTS):
        in_reward = not given.switch("algorithm.use_kl_loss")
    if given["algorithm.use_kl_in_reward"] and given.switch("algorithm.use_kl_loss"):
        yield lacks(
            "algorithm.use_kl_in_reward",
            "KL is either a loss or part of the reward; algorithm.use_kl_loss selects the loss, so set only one of them",
        )
        return
    if in_reward:
        yield from kl_estimator(given, "algorithm.kl_penalty_in_reward", other="k1")
        coefficient = given["algorithm.kl_ctrl.kl_coef"]
        yield Flag("algo.kl.init_coef", 0.001 if coefficient is None else given.number("algorithm.kl_ctrl.kl_coef"))
        return
    if not given.switch("algorithm.use_kl_loss"):
        yield Flag("algo.kl.init_coef", 0.0)
        yield Flag("algo.kl.estimator", KL_ESTIMATORS["kl"])
        yield derived("algorithm.use_kl_loss", "KL is off unless it or algorithm.use_kl_in_reward is set")
    yield from idle(
        given,
        "it has no effect without algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_penalty_in_reward",
    )


def _sampling(given: Given) -> Results:
    """Convert the sampling of validation, which is one greedy response by default in verl."""
    if given.has(IMAGES) and not crops(given):
        yield Flag("data.max_images_per_prompt", given.group(IMAGES).get("image", 0))
    own, *kept_tokens = (f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k"))
    if not given["data.val_files"]:
        why = "nothing is evaluated without data.val_files"
        yield from idle(given, why, own, *kept_tokens, f"{ROLLOUT}.val_n", f"{ROLLOUT}.val_do_sample")
        return
    yield Flag("eval.n_samples_per_prompt", given.whole(f"{ROLLOUT}.val_n") if given.has(f"{ROLLOUT}.val_n") else 1)
    sampled = "worker.rollout.temperature" if given[own] is None else own
    yield Flag("eval.temperature", given.number(sampled) if given[f"{ROLLOUT}.val_do_sample"] else 0.0)
    if given[own] is not None and not given[f"{ROLLOUT}.val_do_sample"]:
        yield lacks(own, f"it has no effect without {ROLLOUT}.val_do_sample")
    for setting, everything in zip(kept_tokens, (1.0, -1), strict=True):
        if given[setting] not in (None, everything):
            yield Flag(f"eval.{setting.rpartition('.')[2]}", given[setting])


def _columns(given: Given) -> Results:
    """Name the columns: verl's rows have `prompt` and `reward_model`, Mini-o3's `problem` and `solution`."""
    prompt, answer = ("problem", "solution") if crops(given) else ("prompt", "reward_model.ground_truth")
    yield Flag("data.input_key", given["data.prompt_key"] if given.has("data.prompt_key") else prompt)
    yield Flag("data.label_key", given["data.answer_key"] if given.has("data.answer_key") else answer)


def _tokens(given: Given) -> Results:
    """Convert the tokens of a dynamic batch, which replace the micro-batch size in verl."""
    for setting, flag in (
        (f"{ACTOR}.ppo_max_token_len_per_gpu", "train.max_tokens_per_gpu"),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", "rollout.max_tokens_per_gpu"),
    ):
        if given[setting] is None:
            continue
        if given.switch("worker.actor.dynamic_batching"):
            yield Flag(flag, given.whole(setting))
        else:
            yield lacks(setting, f"it has no effect without {ACTOR}.use_dynamic_bsz")


def _overlong(given: Given) -> Results:
    enabled, length, factor = _OVERLONG
    if given[enabled]:
        yield Flag("reward.overlong_buffer_len", given.whole(length))
        yield Flag("reward.overlong_penalty_factor", 1.0 if given[factor] is None else given.number(factor))
        return
    yield from idle(given, f"it has no effect without {enabled}", length, factor)


def _resuming(given: Given) -> Results:
    mode = given.text("trainer.resume_mode")
    if mode == "disable":
        yield Flag("ckpt.load_enable", False)
    elif mode == "resume_path":
        yield lacks("trainer.resume_mode", "verl's checkpoints cannot be read; merge one into a model")


def _aggregation(given: Given) -> Results:
    mean, length = given.text(f"{ACTOR}.loss_agg_mode"), given[f"{ACTOR}.loss_scale_factor"]
    if mean == "seq-mean-token-sum":
        yield Flag("actor.loss_agg_mode", CONSTANT)
        yield Flag("actor.loss_agg_length", 1)
    elif mean in (*LOSS_MEANS.values(), CONSTANT):
        yield Flag("actor.loss_agg_mode", mean)
    elif mean is not None:
        yield lacks(
            f"{ACTOR}.loss_agg_mode",
            f"{mean} is unknown, and token-mean replaces it; known are "
            f"{', '.join((*LOSS_MEANS.values(), CONSTANT))}",
        )
    if length is None:
        return
    if mean == CONSTANT:
        yield Flag("actor.loss_agg_length", given.whole(f"{ACTOR}.loss_scale_factor"))
    else:
        yield lacks(f"{ACTOR}.loss_scale_factor", f"it has no effect without loss_agg_mode {CONSTANT}")


def _deviations(given: Given) -> Results:
    """Convert whether GRPO divides advantages by the standard deviation of the group; Dr. GRPO does not."""
    name = "algorithm.norm_adv_by_std_in_grpo"
    if not given.has(name):
        return
    if given.text("algorithm.adv_estimator") != "grpo":
        yield lacks(name, "it has no effect without the estimator grpo")
    elif not given.switch(name):
        yield Flag("algo.advantage.estimator", "dr_grpo")


def _rejection(given: Given) -> Results:
    """Convert dynamic sampling: groups with equal rewards are replaced until the step is full or reaches its bound."""
    multiplier = given.number(_MULTIPLIER) if given.has(_MULTIPLIER) else 1.0
    if given.has(_METRIC) and not given[_FILTER]:
        yield lacks(_METRIC, f"nothing is filtered without {_FILTER}")
    for switch, bound in _BOUNDS.items():
        if not given[switch]:
            yield from idle(given, f"nothing is filtered without {switch}", bound)
            continue
        yield Flag("algo.dynamic_filtering_enable", True)
        yield from _kept_groups(given, switch)
        if given[bound] is not None:
            yield Flag("algo.dynamic_filtering_max_batches", most_batches(given, bound, multiplier=multiplier))
    if multiplier != 1.0:
        yield differs(_MULTIPLIER, "a step draws as many prompts as it still needs")


def _kept_groups(given: Given, switch: str) -> Results:
    """Convert which groups are kept: those whose rewards, or whose answers, differ."""
    if switch == _REJECTION:
        least = _MINI_O3_LEAST_STD
        yield differs(switch, "here the run stops if a judge fails; Mini-o3 drops the group")
    elif given[_METRIC] == _RIGHT:
        yield Flag("algo.dynamic_filtering_range", [0.0, 1.0])
        yield differs(
            _METRIC,
            "a group is kept if its mean score is strictly between 0 and 1, which is the same for scores of 0 and 1; "
            "--algo.dynamic_filtering_part selects a part of the reward",
        )
        return
    else:
        least = _LEAST_STD
    yield Flag("algo.dynamic_filtering_range", [-math.inf, math.inf])
    yield Flag("algo.dynamic_filtering_min_std", least)


def _policy(given: Given) -> Results:
    if given[_TOKENWISE] is not None:
        yield Flag("actor.loss_agg_mode", LOSS_MEANS["token" if given.switch(_TOKENWISE) else "seq"])
    yield from _aggregation(given)
    yield from _deviations(given)
    if given[f"{ACTOR}.entropy_coeff"]:
        yield Flag("actor.entropy_coef", given.number(f"{ACTOR}.entropy_coeff"))
    if given[f"{ACTOR}.clip_ratio"] is not None:
        both = given.number(f"{ACTOR}.clip_ratio")
        sides = [f"worker.actor.clip_ratio_{side}" for side in ("low", "high")]
        if given.text("worker.actor.loss_type") != "sapo":
            yield Flag("actor.eps_clip_low_high", [given.number(side) if given.has(side) else both for side in sides])
    path = given.text("custom_reward_function.path")
    if path is not None:
        yield Flag("reward.remote_url", f"{path}:{given.text('custom_reward_function.name') or 'compute_score'}")
    elif given.has("custom_reward_function.name"):
        yield lacks(
            "custom_reward_function.name", "custom_reward_function.path is missing, which the function belongs to"
        )


_DEFAULTS = names_of("verl_defaults")

VERL = Table(
    system="verl",
    command="train_ppo_ray",
    settings=(
        *(
            replace(setting, default=_DEFAULTS.get(setting.name, setting.default))
            for setting in EASYR1.settings
            # A text there is a name here.
            if setting.name != "data.system_prompt"
        ),
        *settings_of("verl"),
        *TURN_SETTINGS,
        *REWARD_SETTINGS,
    ),
    # If several rules set a flag, the last one wins.
    rules=(
        *(IN_PLACE.get(rule, rule) for rule in EASYR1.rules),
        *(_kl, _sampling, _columns, _tokens, _overlong, _resuming, _rejection, _policy),
        *TURN_RULES,
        *REWARD_RULES,
    ),
    names=names_of("verl_names"),
    families=names_of("verl_families"),
)

_SCHEDULES = {"cosine": "cosine_with_min_lr", "wsd": "cosine_with_min_lr", "constant": "constant_with_warmup"}


def _sft_files(given: Given) -> Results:
    files = given["data.train_files"]
    if files:
        yield Flag("data.dataset", ",".join(map(str, files)) if isinstance(files, list) else files)
    held_out, every = given["data.val_files"], given.whole("trainer.test_freq")
    if held_out:
        yield Flag("eval.dataset", ",".join(map(str, held_out)) if isinstance(held_out, list) else held_out)
        yield Flag("eval.steps", every)


def _sft_columns(given: Given) -> Results:
    if given["data.multiturn.enable"]:
        yield Flag("data.input_key", given["data.multiturn.messages_key"])
        return
    if given.has("data.messages_key"):
        yield Flag("data.input_key", given["data.messages_key"])
    if given.has("data.prompt_key"):
        yield Flag("data.input_key", given["data.prompt_key"])
    if given.has("data.response_key"):
        yield Flag("data.output_key", given["data.response_key"])
    for name in ("data.prompt_dict_keys", "data.response_dict_keys"):
        if keys := given[name]:
            inner = ".".join(map(str, keys)) if isinstance(keys, list) else keys
            of = name.replace("dict_keys", "key")
            yield Flag("data.input_key" if "prompt" in name else "data.output_key", f"{given[of]}.{inner}")


def _sft_optimizer(given: Given) -> Results:
    if (most := given["data.train_max_samples"]) is not None and given.whole("data.train_max_samples") > 0:
        yield Flag("data.max_samples", most)
    schedule = _SCHEDULES.get(str(given["optim.lr_scheduler"]), "cosine_with_min_lr")
    yield Flag("lr_scheduler", schedule)
    if schedule == "cosine_with_min_lr":
        yield Flag("min_lr_ratio", given.number("optim.min_lr_ratio"))
    if given.whole("model.lora_rank"):
        modules = given["model.target_modules"]
        yield Flag("ds.lora.target_modules", modules if isinstance(modules, list) else [modules])


VERL_SFT = Table(
    system="verl",
    command="train_sft",
    settings=settings_of("verl_sft"),
    rules=(
        _sft_files,
        _sft_columns,
        _sft_optimizer,
        lambda given: trackers(given, "trainer.logger", "console", "file"),
    ),
    names=names_of("verl_sft_names"),
)
