"""Conversion of verl's settings (`actor_rollout_ref`), including Mini-o3's turns and rewards.

EasyR1 is based on verl, so its rules are used: settings get EasyR1's names and verl's defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from lmm_r1.config.ppo import CONSTANT, DEFAULT_VERIFIER
from lmm_r1.errors import UserError
from lmm_r1.tools.migrate.easyr1 import (
    EASYR1,
    KL_ESTIMATORS,
    LOSS_MEANS,
    batches,
    kl_estimator,
    lengths,
    longest_sample,
    most_batches,
    overlong_prompts,
)
from lmm_r1.tools.migrate.table import Given, Rule, Table, names_of, settings_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CROPPING = "vllm_multi_turn_tool_call"
"""Mini-o3's name of the rollout with its tool."""
IMAGES, EVALUATION_IMAGES = f"{ROLLOUT}.limit_mm_per_prompt", f"{ROLLOUT}.val_limit_mm_per_prompt"
ROUNDS, EVALUATION_ROUNDS = f"{ROLLOUT}.max_generation_round", f"{ROLLOUT}.val_max_generation_round"
LONGEST = f"{ROLLOUT}.max_total_response_length"
ROOM = 2000
"""Tokens that Mini-o3 reserves after a call and after its observation."""
_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056}
"""Pixel bounds of images if Mini-o3's `data` has none."""
_OWN_WORDS = "in the words of the environment; docs/crop.md has those of the Mini-o3 checkpoints (--agent.options)"
OF_ALL_GPUS = {
    f"{ACTOR}.ppo_micro_batch_size": "train.micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size": "rollout.micro_batch_size",
}


def crops(given: Given) -> bool:
    """Return whether an environment answers the policy's turns with crops."""
    return given.text(f"{ROLLOUT}.name") == CROPPING


def _crop(given: Given) -> None:
    """Convert Mini-o3's rollout: its rounds become turns, and its images include that of the question."""
    prompt, name = given["data.system_prompt"], given.text(f"{ROLLOUT}.name")
    if name not in (None, "vllm", CROPPING):
        given.lacks(f"{ROLLOUT}.name", f"vLLM generates, not {name}")
    if not crops(given):
        if prompt:
            given.lacks("data.system_prompt", "verl takes a name; give the text as --data.system_prompt")
        return
    given.set("train.agent", "crop")
    # Boxes are converted to pixels as in Mini-o3's tool.
    options: dict[str, object] = {
        "coordinates": "relative" if given.switch(f"{ROLLOUT}.use_relative_coordinates") else "absolute",
        **{"edges": "clamp", "rounding": "down"},
    }
    for bound, default in _PIXELS.items():
        options[bound] = default if given[f"data.{bound}"] is None else given.whole(f"data.{bound}")
    given.set("agent.options", json.dumps(options))
    folder = "Mini-o3 resolves image paths against $BASE_IMAGE_DIR; give this folder as --data.image_dir"
    given.differs("data.train_files", folder)
    if prompt:
        given.differs("data.system_prompt", f"the protocol is in a system turn, {_OWN_WORDS}")
    turns, most = given.whole(ROUNDS), _most_images(given, IMAGES)
    given.set("agent.max_turns", turns)
    given.set("data.max_images_per_prompt", 1)
    given.set("agent.max_images", most - 1)
    given.derived(IMAGES, f"{most} images include that of the question, so --agent.max_images is {most - 1}")
    # With one round, Mini-o3 evaluates with the limits of training.
    if (rounds := given.whole(EVALUATION_ROUNDS)) != 1:
        images = _most_images(given, EVALUATION_IMAGES)
        limits = f"--agent.max_turns {turns}, --agent.max_images {most - 1}"
        text = f"evaluation during training has {limits}; `lmm-r1 evaluate --agent crop` has others:"
        if rounds != turns:
            given.lacks(EVALUATION_ROUNDS, f"{text} --agent_max_turns {rounds}")
        if images != most:
            given.lacks(EVALUATION_IMAGES, f"{text} --agent_max_images {images - 1}")
    masks = given.switch(f"{ACTOR}.ignore_exceed")
    given.set("agent.overturn", "mask" if masks else "keep")
    if masks:
        text = "such an episode does not count in its group; in Mini-o3 its reward counts in the group's mean"
        given.differs(f"{ACTOR}.ignore_exceed", text)


def _most_images(given: Given, setting: str) -> int:
    most = given.group(setting).get("image", 1)
    if not isinstance(most, int) or most < 1:
        raise UserError(f"{setting}: image is {most!r}; it must be a whole number of at least 1")
    return most


def _longest(given: Given) -> int:
    return given.whole(LONGEST) if crops(given) else longest_sample(given)


def _lengths(given: Given) -> None:
    if not crops(given):
        lengths(given)
        return
    longest, response = _longest(given), given.whole("data.max_response_length")
    given.set("data.max_len", longest)
    given.set("rollout.max_new_tokens", response)
    text = (
        f"--data.max_len {longest} bounds an episode with its prompt, --rollout.max_new_tokens {response} one turn; an "
        f"episode ends if nothing is left, in Mini-o3 if a call or an observation leaves {ROOM} or fewer"
    )
    given.differs(f"data.max_response_length, {LONGEST}", text)


def _batches(given: Given) -> None:
    batches(given, longest=_longest(given))
    # The first versions count the samples of a pass on all GPUs together.
    count = max(1, given.whole("trainer.nnodes") * given.whole("trainer.n_gpus_per_node"))
    for setting, flag in OF_ALL_GPUS.items():
        if given[setting] is not None:
            given.set(flag, max(1, given.whole(setting) // count))
            given.derived(setting, f"it counts samples on all {count} GPUs, --{flag} on one")


def _overlong_prompts(given: Given) -> None:
    skips, cut = given.switch("data.filter_overlong_prompts"), given.text("data.truncation")
    given.set("data.overlong_prompts", "skip" if skips else "error")
    if cut != "error":
        what = "longer prompts are left out" if skips else "a run stops at a prompt that is too long"
        given.differs("data.truncation", f"verl cuts longer prompts ({cut}); here {what}")


IN_PLACE: Mapping[Rule, Rule] = {lengths: _lengths, batches: _batches, overlong_prompts: _overlong_prompts}
"""EasyR1's rules for single responses, and those that replace them for episodes."""

ADDRESS = "http://127.0.0.1:5000/get_reward"
"""Default of `lmm-r1 serve_verifier`."""
_FUNCTION = "custom_reward_function.path"


def _rewards(given: Given) -> None:
    """Convert the scorer, and the weights of (1 - penalty * [tool]) * accuracy + format of all turns + [tool]."""
    if given["reward_model.enable"] and (model := given.text("reward_model.model.path")) is not None:
        given.set("reward.model_name_or_path", model)
    elif (path := given.text(_FUNCTION)) is not None:
        given.set("reward.remote_url", f"{path}:{given.text('custom_reward_function.name') or 'compute_score'}")
    elif crops(given):
        _scorer_of_mini_o3(given)
    else:
        given.set("reward.remote_url", DEFAULT_VERIFIER)
        given.differs(_FUNCTION, "without it verl judges each row by its data_source; here math judges all rows")
    if not crops(given) or given.text(_FUNCTION) is not None:
        return
    weights = {
        "accuracy * used_tool": -given.number("data.tool_call_penalty") * given.number("data.acc_reward_weight"),
        "turn_format": given.number("data.format_reward_weight"),
        "used_tool": given.number("data.use_tool_reward_weight"),
    }
    weighed = {name: weight for name, weight in weights.items() if weight}
    if weighed:
        given.set("reward.part_weights", json.dumps(weighed))
    if any("used_tool" in name for name in weighed):
        text = "they count for an executed call; in Mini-o3 also for one that was only written"
        given.differs("data.tool_call_penalty, data.use_tool_reward_weight", text)


def _scorer_of_mini_o3(given: Given) -> None:
    hybrid, accuracy = given.switch("reward_model.use_hybrid_reward_manager"), given.number("data.acc_reward_weight")
    asked = "data.gpt_general_qa_reward_fn" if hybrid else "data.general_qa_reward_fn"
    scorer = given.text(asked)
    if scorer == "general_qa_tool_mc":
        given.set("reward.remote_url", f"choice:accuracy_weight={accuracy:g},format_weight=0")
        return
    given.set("reward.remote_url", ADDRESS)
    command = f"lmm-r1 serve_verifier llm_judge --accuracy-weight {accuracy:g} --format-weight 0 --judge-url URL"
    given.differs(asked, f"{scorer} is a service here: start `{command} --judge-model MODEL`, and set --reward to it")


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
_TOKENWISE = f"{ACTOR}.use_token_level_loss"


def _kl(given: Given) -> None:
    """Convert the KL penalty: in verl it is a loss, part of the reward, or absent, which is the default."""
    name, as_loss = "algorithm.use_kl_in_reward", given.switch("algorithm.use_kl_loss")
    if as_loss:
        if given[name]:
            text = "KL is either a loss or part of the reward; algorithm.use_kl_loss selects the loss, so set only one of them"
            given.lacks(name, text)
    elif given[name] or (not given.has(name) and given.has(_GRADIENTS)):
        kl_estimator(given, "algorithm.kl_penalty_in_reward", other="k1")
        coefficient = given["algorithm.kl_ctrl.kl_coef"]
        given.set("algo.kl.init_coef", 0.001 if coefficient is None else given.number("algorithm.kl_ctrl.kl_coef"))
    else:
        given.set("algo.kl.init_coef", 0.0)
        given.set("algo.kl.estimator", KL_ESTIMATORS["kl"])
        given.derived("algorithm.use_kl_loss", f"KL is off unless it or {name} is set")


def _sampling(given: Given) -> None:
    """Convert the sampling of validation, which is one greedy response by default in verl."""
    if given.has(IMAGES) and not crops(given):
        given.set("data.max_images_per_prompt", given.group(IMAGES).get("image", 0))
    if not given["data.val_files"]:
        return
    own, *kept_tokens = (f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k"))
    given.set("eval.n_samples_per_prompt", given.whole(f"{ROLLOUT}.val_n") if given.has(f"{ROLLOUT}.val_n") else 1)
    given.set("eval.temperature", 0.0)
    if given[f"{ROLLOUT}.val_do_sample"]:
        given.set("eval.temperature", given.number("worker.rollout.temperature" if given[own] is None else own))
    for setting, everything in zip(kept_tokens, (1.0, -1), strict=True):
        if given[setting] not in (None, everything):
            given.set(f"eval.{setting.rpartition('.')[2]}", given[setting])


def _rows(given: Given) -> None:
    """Name the columns: verl's rows have `prompt` and `reward_model`, Mini-o3's `problem` and `solution`."""
    prompt, answer = ("problem", "solution") if crops(given) else ("prompt", "reward_model.ground_truth")
    given.set("data.input_key", given["data.prompt_key"] if given.has("data.prompt_key") else prompt)
    given.set("data.label_key", given["data.answer_key"] if given.has("data.answer_key") else answer)
    # Tokens of a dynamic batch, which replace the micro-batch size in verl.
    for owner, flag in ((f"{ACTOR}.ppo", "train"), (f"{ROLLOUT}.log_prob", "rollout")):
        setting = f"{owner}_max_token_len_per_gpu"
        if given.switch("worker.actor.dynamic_batching") and given[setting] is not None:
            given.set(f"{flag}.max_tokens_per_gpu", given.whole(setting))
    if given[f"{_OVERLONG}.enable"]:
        factor = f"{_OVERLONG}.penalty_factor"
        given.set("reward.overlong_buffer_len", given.whole(f"{_OVERLONG}.len"))
        given.set("reward.overlong_penalty_factor", 1.0 if given[factor] is None else given.number(factor))
    if (mode := given.text("trainer.resume_mode")) == "disable":
        given.set("ckpt.load_enable", False)
    elif mode == "resume_path":
        given.lacks("trainer.resume_mode", "verl's checkpoints cannot be read; merge one into a model")


def _rejection(given: Given) -> None:
    """Convert dynamic sampling: groups with equal rewards are replaced until the step is full or reaches its bound."""
    for switch, bound in _BOUNDS.items():
        if not given[switch]:
            continue
        given.set("algo.dynamic_filtering_enable", True)
        if switch == _FILTER and given[_METRIC] == _RIGHT:
            given.set("algo.dynamic_filtering_range", [0.0, 1.0])
            text = "a group is kept if its mean score is strictly between 0 and 1; --algo.dynamic_filtering_part"
            given.differs(_METRIC, f"{text} selects a part of the reward")
        else:
            given.set("algo.dynamic_filtering_range", [-math.inf, math.inf])
            given.set("algo.dynamic_filtering_min_std", _LEAST_STD[switch])
        if switch == _REJECTION:
            given.differs(switch, "here the run stops if a judge fails; Mini-o3 drops the group")
        multiplier = given.number(_MULTIPLIER) if given.has(_MULTIPLIER) else 1.0
        if multiplier != 1.0:
            given.differs(_MULTIPLIER, "a step draws as many prompts as it still needs")
        if given[bound] is not None:
            given.set("algo.dynamic_filtering_max_batches", most_batches(given, bound, multiplier=multiplier))


def _policy(given: Given) -> None:
    """Convert the loss; Dr. GRPO does not divide advantages by the standard deviation of the group."""
    if given[_TOKENWISE] is not None:
        given.set("actor.loss_agg_mode", LOSS_MEANS["token" if given.switch(_TOKENWISE) else "seq"])
    mean, known = given.text(f"{ACTOR}.loss_agg_mode"), (*LOSS_MEANS.values(), CONSTANT)
    if mean == "seq-mean-token-sum":
        given.set("actor.loss_agg_mode", CONSTANT)
        given.set("actor.loss_agg_length", 1)
    elif mean in known:
        given.set("actor.loss_agg_mode", mean)
        if mean == CONSTANT and given[f"{ACTOR}.loss_scale_factor"] is not None:
            given.set("actor.loss_agg_length", given.whole(f"{ACTOR}.loss_scale_factor"))
    elif mean is not None:
        text = f"{mean} is unknown, and token-mean replaces it; known are {', '.join(known)}"
        given.lacks(f"{ACTOR}.loss_agg_mode", text)
    divides = "algorithm.norm_adv_by_std_in_grpo"
    if given.text("algorithm.adv_estimator") == "grpo" and given.has(divides) and not given.switch(divides):
        given.set("algo.advantage.estimator", "dr_grpo")
    if given[f"{ACTOR}.entropy_coeff"]:
        given.set("actor.entropy_coef", given.number(f"{ACTOR}.entropy_coeff"))
    if given.text("worker.actor.loss_type") != "sapo" and given[f"{ACTOR}.clip_ratio"] is not None:
        both = given.number(f"{ACTOR}.clip_ratio")
        sides = [f"worker.actor.clip_ratio_{side}" for side in ("low", "high")]
        given.set("actor.eps_clip_low_high", [given.number(side) if given.has(side) else both for side in sides])


VERL = Table(
    system="verl",
    command="train_ppo_ray",
    # A system prompt is text there, and a name here. If several rules set a flag, the last one wins.
    settings=(
        *(
            one._replace(default=names_of("verl_defaults").get(one.name, one.default))
            for one in EASYR1.settings
            if one.name != "data.system_prompt"
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
        _crop,
        _rewards,
    ),
    names=names_of("verl_names"),
    families=names_of("verl_families"),
)
