"""Conversion of verl's rewards, and of Mini-o3's turns and rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lmm_r1.config.ppo import DEFAULT_VERIFIER
from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1 import batches, lengths, longest_sample, overlong_prompts
from lmm_r1.migrate.table import Flag, Given, Results, Rule, derived, differs, lacks

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


def _crop(given: Given) -> Results:
    """Convert Mini-o3's rollout: its rounds become turns, and its images include that of the question."""
    prompt, name = given["data.system_prompt"], given.text(f"{ROLLOUT}.name")
    if name not in (None, "vllm", CROPPING):
        yield lacks(f"{ROLLOUT}.name", f"vLLM generates, not {name}")
    if not crops(given):
        if prompt:
            yield lacks("data.system_prompt", "verl takes a name; give the text as --data.system_prompt")
        return
    yield Flag("train.agent", "crop")
    # Boxes are converted to pixels as in Mini-o3's tool.
    options: dict[str, object] = {
        "coordinates": "relative" if given.switch(f"{ROLLOUT}.use_relative_coordinates") else "absolute",
        **{"edges": "clamp", "rounding": "down"},
    }
    for bound, default in _PIXELS.items():
        options[bound] = default if given[f"data.{bound}"] is None else given.whole(f"data.{bound}")
    yield Flag("agent.options", json.dumps(options))
    folder = "Mini-o3 resolves image paths against $BASE_IMAGE_DIR; give this folder as --data.image_dir"
    yield differs("data.train_files", folder)
    if prompt:
        yield differs("data.system_prompt", f"the protocol is in a system turn, {_OWN_WORDS}")
    turns, most = given.whole(ROUNDS), _most_images(given, IMAGES)
    yield Flag("agent.max_turns", turns)
    yield Flag("data.max_images_per_prompt", 1)
    yield Flag("agent.max_images", most - 1)
    yield derived(IMAGES, f"{most} images include that of the question, so --agent.max_images is {most - 1}")
    # With one round, Mini-o3 evaluates with the limits of training.
    if (rounds := given.whole(EVALUATION_ROUNDS)) != 1:
        images = _most_images(given, EVALUATION_IMAGES)
        limits = f"--agent.max_turns {turns}, --agent.max_images {most - 1}"
        text = f"evaluation during training has {limits}; `lmm-r1 evaluate --agent crop` has others:"
        if rounds != turns:
            yield lacks(EVALUATION_ROUNDS, f"{text} --agent_max_turns {rounds}")
        if images != most:
            yield lacks(EVALUATION_IMAGES, f"{text} --agent_max_images {images - 1}")
    masks = given.switch(f"{ACTOR}.ignore_exceed")
    yield Flag("agent.overturn", "mask" if masks else "keep")
    if masks:
        text = "such an episode does not count in its group; in Mini-o3 its reward counts in the group's mean"
        yield differs(f"{ACTOR}.ignore_exceed", text)


def _most_images(given: Given, setting: str) -> int:
    most = given.group(setting).get("image", 1)
    if not isinstance(most, int) or most < 1:
        raise UserError(f"{setting}: image is {most!r}; it must be a whole number of at least 1")
    return most


def _longest(given: Given) -> int:
    return given.whole(LONGEST) if crops(given) else longest_sample(given)


def _lengths(given: Given) -> Results:
    if not crops(given):
        yield from lengths(given)
        return
    longest, response = _longest(given), given.whole("data.max_response_length")
    yield Flag("data.max_len", longest)
    yield Flag("rollout.max_new_tokens", response)
    text = (
        f"--data.max_len {longest} bounds an episode with its prompt, --rollout.max_new_tokens {response} one turn; an "
        f"episode ends if nothing is left, in Mini-o3 if a call or an observation leaves {ROOM} or fewer"
    )
    yield differs(f"data.max_response_length, {LONGEST}", text)


def _batches(given: Given) -> Results:
    yield from batches(given, longest=_longest(given))
    # The first versions count the samples of a pass on all GPUs together.
    count = max(1, given.whole("trainer.nnodes") * given.whole("trainer.n_gpus_per_node"))
    for setting, flag in OF_ALL_GPUS.items():
        if given[setting] is not None:
            yield Flag(flag, max(1, given.whole(setting) // count))
            yield derived(setting, f"it counts samples on all {count} GPUs, --{flag} on one")


def _overlong_prompts(given: Given) -> Results:
    skips, cut = given.switch("data.filter_overlong_prompts"), given.text("data.truncation")
    yield Flag("data.overlong_prompts", "skip" if skips else "error")
    if cut != "error":
        what = "longer prompts are left out" if skips else "a run stops at a prompt that is too long"
        yield differs("data.truncation", f"verl cuts longer prompts ({cut}); here {what}")


IN_PLACE: Mapping[Rule, Rule] = {lengths: _lengths, batches: _batches, overlong_prompts: _overlong_prompts}
"""EasyR1's rules for single responses, and those that replace them for episodes."""

ADDRESS = "http://127.0.0.1:5000/get_reward"
"""Default of `lmm-r1 serve_verifier`."""
_FUNCTION = "custom_reward_function.path"


def _rewards(given: Given) -> Results:
    """Convert the scorer, and the weights of (1 - penalty * [tool]) * accuracy + format of all turns + [tool]."""
    if given["reward_model.enable"] and (model := given.text("reward_model.model.path")) is not None:
        yield Flag("reward.model_name_or_path", model)
    elif (path := given.text(_FUNCTION)) is not None:
        yield Flag("reward.remote_url", f"{path}:{given.text('custom_reward_function.name') or 'compute_score'}")
    elif crops(given):
        yield from _scorer_of_mini_o3(given)
    else:
        yield Flag("reward.remote_url", DEFAULT_VERIFIER)
        yield differs(_FUNCTION, "without it verl judges each row by its data_source; here math judges all rows")
    if not crops(given) or given.text(_FUNCTION) is not None:
        return
    weights = {
        "accuracy * used_tool": -given.number("data.tool_call_penalty") * given.number("data.acc_reward_weight"),
        "turn_format": given.number("data.format_reward_weight"),
        "used_tool": given.number("data.use_tool_reward_weight"),
    }
    weighed = {name: weight for name, weight in weights.items() if weight}
    if weighed:
        yield Flag("reward.part_weights", json.dumps(weighed))
    if any("used_tool" in name for name in weighed):
        text = "they count for an executed call; in Mini-o3 also for one that was only written"
        yield differs("data.tool_call_penalty, data.use_tool_reward_weight", text)


def _scorer_of_mini_o3(given: Given) -> Results:
    hybrid, accuracy = given.switch("reward_model.use_hybrid_reward_manager"), given.number("data.acc_reward_weight")
    asked = "data.gpt_general_qa_reward_fn" if hybrid else "data.general_qa_reward_fn"
    scorer = given.text(asked)
    if scorer == "general_qa_tool_mc":
        yield Flag("reward.remote_url", f"choice:accuracy_weight={accuracy:g},format_weight=0")
        return
    yield Flag("reward.remote_url", ADDRESS)
    command = f"lmm-r1 serve_verifier llm_judge --accuracy-weight {accuracy:g} --format-weight 0 --judge-url URL"
    yield differs(asked, f"{scorer} is a service here: start `{command} --judge-model MODEL`, and set --reward to it")


TURN_RULES: tuple[Rule, ...] = (_crop, _rewards)
