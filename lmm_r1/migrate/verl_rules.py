"""Conversion of verl's rewards, turns and tools, and of Mini-o3's variants of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Literal

from lmm_r1.config.ppo import DEFAULT_VERIFIER, AgentConfig
from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1 import batches, lengths, longest_sample, overlong_prompts
from lmm_r1.migrate.table import Flag, Given, Results, Rule, Setting, derived, differs, idle, lacks, names_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CROPPING = "vllm_multi_turn_tool_call"
"""Mini-o3's name of the rollout with its tool."""
IMAGES = f"{ROLLOUT}.limit_mm_per_prompt"
LONGEST = f"{ROLLOUT}.max_total_response_length"
ROOM = 2000
"""Tokens that Mini-o3 reserves after a call and after its observation."""
_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056}
"""Pixel bounds of images if Mini-o3's `data` has none."""

DEFAULTS = names_of("mini_o3_turns")
"""Defaults of the settings that only this rollout reads."""

_OWN_WORDS = (
    'in the words of the environment; for those of the Mini-o3 checkpoints, add "prompts": '
    '"Mini-o3/verl/trainer/constants.py" to --agent.options (docs/crop.md)'
)
UNLIKE = names_of("mini_o3_unlike")
"""Settings with only one behaviour here: the value that selects it, and the note about other values."""
OF_ALL_GPUS = {
    f"{ACTOR}.ppo_micro_batch_size": "train.micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size": "rollout.micro_batch_size",
}


def crops(given: Given) -> bool:
    """Return whether an environment answers the policy's turns with crops."""
    return given.text(f"{ROLLOUT}.name") == CROPPING


def _environment(given: Given) -> Results:
    prompt = given["data.system_prompt"]
    if not crops(given):
        if prompt:
            yield lacks("data.system_prompt", "verl takes a name; give the text as --data.system_prompt")
        return
    yield Flag("train.agent", "crop")
    coordinates = "relative" if given.switch(f"{ROLLOUT}.use_relative_coordinates") else "absolute"
    pixels = {
        bound: default if given[f"data.{bound}"] is None else given.whole(f"data.{bound}")
        for bound, default in _PIXELS.items()
    }
    # Boxes are converted to pixels as in Mini-o3's tool.
    cut = {"edges": "clamp", "rounding": "down"}
    yield Flag("agent.options", json.dumps({"coordinates": coordinates, **cut, **pixels}))
    yield differs(
        "data.train_files",
        "Mini-o3 resolves image paths against $BASE_IMAGE_DIR; give this folder as --data.image_dir",
    )
    if prompt:
        yield differs("data.system_prompt", f"the protocol is in a system turn, {_OWN_WORDS}")


def _limits(given: Given) -> Results:
    """Convert rounds to turns of the policy; Mini-o3 counts the one image of the question as well."""
    if not crops(given):
        return
    yield Flag("agent.max_turns", given.whole(f"{ROLLOUT}.max_generation_round"))
    most = _most_images(given, IMAGES)
    yield Flag("data.max_images_per_prompt", 1)
    yield Flag("agent.max_images", most - 1)
    yield derived(IMAGES, f"{most} images include that of the question, so --agent.max_images is {most - 1}")


def _most_images(given: Given, setting: str) -> int:
    most = given.group(setting).get("image", 1)
    if not isinstance(most, int) or most < 1:
        raise UserError(f"{setting}: image is {most!r}; it must be a whole number of at least 1")
    return most


def _evaluation(given: Given) -> Results:
    if not crops(given):
        return
    rounds, images = f"{ROLLOUT}.val_max_generation_round", f"{ROLLOUT}.val_limit_mm_per_prompt"
    turns = given.whole(rounds)
    # With one round, Mini-o3 evaluates with the limits of training.
    if turns == 1:
        yield from idle(given, f"Mini-o3 ignores it if {rounds} is 1", images)
        return
    for flag, setting, theirs, ours in (
        ("max_turns", rounds, turns, given.whole(f"{ROLLOUT}.max_generation_round")),
        ("max_images", images, _most_images(given, images) - 1, _most_images(given, IMAGES) - 1),
    ):
        if theirs != ours:
            yield lacks(
                setting,
                f"evaluation during training has the limits of training, --agent.{flag} {ours}; `lmm-r1 evaluate "
                f"--agent crop --agent_{flag} {theirs}` has others",
            )


def _over_turn(given: Given) -> Results:
    """Convert what happens to an episode that a limit ends."""
    if not crops(given):
        return
    masks = given.switch(f"{ACTOR}.ignore_exceed")
    yield Flag("agent.overturn", "mask" if masks else "keep")
    if masks:
        yield differs(
            f"{ACTOR}.ignore_exceed",
            "such an episode does not count in its group; in Mini-o3 its reward counts in the group's mean",
        )


MULTI_TURN = f"{ROLLOUT}.multi_turn"
_ENABLE = f"{MULTI_TURN}.enable"
_TOOLS = (f"{MULTI_TURN}.tool_config_path", f"{MULTI_TURN}.function_tool_path")
_ANSWERED_BY = (*_TOOLS, f"{MULTI_TURN}.interaction_config_path", f"{ROLLOUT}.agent.agent_loop_config_path")
"""Files that tell verl who answers a turn: tools, a simulated user, or a custom loop."""
_LONGEST_TEXT, _CUT_SIDE = f"{MULTI_TURN}.max_tool_response_length", f"{MULTI_TURN}.tool_response_truncate_side"

_DEFAULTS = names_of("verl_turns")
"""Settings that matter only with an environment."""
_UNLIKE = names_of("verl_unlike")
"""The same as `UNLIKE`, for episodes with other tools."""


def player(given: Given) -> Literal["crop", "file"] | None:
    """Return who answers the policy's turns: the environment `crop`, one that the user must write, or nobody."""
    if crops(given):
        return "crop"
    return "file" if given.switch(_ENABLE) and any(map(given.text, _ANSWERED_BY)) else None


def _unlike(given: Given) -> Results:
    """Report settings without effect, and values that episodes have no flag for."""
    playing = player(given)
    for who, defaults, unlike, needed in (
        ("crop", DEFAULTS, UNLIKE, f"{ROLLOUT}.name {CROPPING}"),
        ("file", _DEFAULTS, _UNLIKE, f"{_ENABLE} and a file that defines who answers"),
    ):
        for name, default in defaults.items():
            if playing != who:
                if given.has(name) and given[name] != default:
                    yield lacks(name, f"it has no effect without {needed}")
            elif name in unlike and given[name] != unlike[name][0]:
                yield lacks(name, unlike[name][1])


def _turns_environment(given: Given) -> Results:
    name = given.text(f"{ROLLOUT}.name")
    if name not in (None, "vllm", CROPPING):
        yield lacks(f"{ROLLOUT}.name", f"vLLM generates, not {name}")
    if not given.switch(_ENABLE):
        return
    if crops(given):
        yield lacks(_ENABLE, f"it has no effect with {ROLLOUT}.name {CROPPING}")
        return
    named = {setting: path for setting in _ANSWERED_BY if (path := given.text(setting))}
    if named:
        yield from _file(given, named)
        return
    answers = ", ".join(_ANSWERED_BY)
    yield lacks(_ENABLE, f"without one of {answers} nobody answers a turn, so responses have one turn")


def _file(given: Given, named: Mapping[str, str]) -> Results:
    """Yield the flag of an environment that replaces verl's classes, in a file next to the first one named."""
    setting, *others = named
    ours = str(PurePosixPath(named[setting]).with_suffix(".py"))
    written = "the tools as functions in a list TOOLS" if setting in _TOOLS else "a class Environment"
    yield Flag("train.agent", ours)
    yield differs(setting, f"verl's classes cannot be loaded; write {written} in {ours} (docs/extending.md)")
    for other in others:
        yield lacks(other, f"only one environment answers, that in {ours}; write both in this file")
    if setting in _TOOLS:
        length, side = given.whole(_LONGEST_TEXT), given.text(_CUT_SIDE)
        yield lacks(
            f"{_LONGEST_TEXT}, {_CUT_SIDE}",
            f"verl cuts longer texts of a tool to {length} characters ({side}); cut them in the function",
        )


def _turn_limits(given: Given) -> Results:
    """Convert the limits; verl trains on an episode that a limit ends like on any other."""
    if player(given) != "file":
        return
    yield Flag("agent.overturn", "keep")
    # After the user's last turn the policy has one more.
    bounds = {f"{MULTI_TURN}.max_assistant_turns": 0, f"{MULTI_TURN}.max_user_turns": 1}
    turns = [given.whole(name) + more for name, more in bounds.items() if given[name] is not None]
    most = min(turns, default=longest_sample(given) // 3)
    why = (
        "the policy's turns, one more than the user's" if turns else "verl has no limit; this is a third of all tokens"
    )
    yield Flag("agent.max_turns", most)
    yield derived(", ".join(bounds), f"--agent.max_turns {most}: {why}")
    images = AgentConfig.max_images
    yield differs(_ENABLE, f"an episode also ends at --agent.max_images, by default {images}")


def _lengths(given: Given) -> Results:
    playing, response = player(given), given.whole("data.max_response_length")
    if playing is None:
        yield from lengths(given)
        return
    longest = _longest(given)
    yield Flag("data.max_len", longest)
    yield Flag("rollout.max_new_tokens", response)
    both = f"--data.max_len {longest} bounds an episode with its prompt, --rollout.max_new_tokens {response} one turn"
    if playing == "crop":
        yield differs(
            f"data.max_response_length, {LONGEST}",
            f"{both}; an episode ends if an observation leaves no tokens, in Mini-o3 if a call or an observation "
            f"leaves {ROOM} or fewer",
        )
    else:
        yield differs("data.max_prompt_length, data.max_response_length", both)


def _longest(given: Given) -> int:
    return given.whole(LONGEST) if crops(given) else longest_sample(given)


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


TURN_SETTINGS = tuple(
    Setting(name=name, by_rule=True, default=default)
    for name, default in {
        **DEFAULTS,
        **_DEFAULTS,
        "data.system_prompt": False,
        f"{ROLLOUT}.name": None,
        _ENABLE: False,
        "data.truncation": "error",
        **dict.fromkeys(OF_ALL_GPUS),
        IMAGES: {"image": 1},
    }.items()
)
TURN_RULES: tuple[Rule, ...] = (
    _environment,
    _limits,
    _evaluation,
    _over_turn,
    _turns_environment,
    _turn_limits,
    _unlike,
)
IN_PLACE: Mapping[Rule, Rule] = {lengths: _lengths, batches: _batches, overlong_prompts: _overlong_prompts}
"""EasyR1's rules for single responses, and those that replace them for episodes."""


ADDRESS = "http://127.0.0.1:5000/get_reward"
"""Default of `lmm-r1 serve_verifier`."""
JUDGE = "here a verifier judges: name one with --reward, or the address of a `lmm-r1 serve_verifier`"
_FUNCTION = "custom_reward_function.path"
_HYBRID = "reward_model.use_hybrid_reward_manager"
_SCORERS = {True: "data.gpt_general_qa_reward_fn", False: "data.general_qa_reward_fn"}
"""The setting of the scorer that Mini-o3 asks, by the value of `_HYBRID`."""
_CHOICE = "general_qa_tool_mc"
_MINI_O3 = names_of("mini_o3_rewards")


def _scorer(given: Given) -> Results:
    """Convert the scorer; an environment without rewards needs one for its last turn."""
    model = given.text("reward_model.model.path") if given["reward_model.enable"] else None
    if model is not None:
        yield Flag("reward.model_name_or_path", model)
        return
    yield from idle(given, "it has no effect without reward_model.enable", "reward_model.model.path")
    if given.text(_FUNCTION) is not None:
        return
    if player(given) != "crop":
        yield Flag("reward.remote_url", DEFAULT_VERIFIER)
        yield differs(_FUNCTION, "without it verl judges each row by its data_source; here math judges all rows")
        return
    hybrid, accuracy = given.switch(_HYBRID), given.number("data.acc_reward_weight")
    asked, never = _SCORERS[hybrid], _SCORERS[not hybrid]
    scorer = given.text(asked)
    if scorer == _CHOICE:
        yield Flag("reward.remote_url", f"choice:accuracy_weight={accuracy:g},format_weight=0")
    else:
        yield Flag("reward.remote_url", ADDRESS)
        yield differs(
            asked,
            f"{scorer} is a service here: start `lmm-r1 serve_verifier llm_judge --accuracy-weight {accuracy:g} "
            "--format-weight 0 --judge-url URL --judge-model MODEL`, and set --reward to its address as all machines "
            "reach it",
        )
    yield from idle(given, f"it is not asked if {_HYBRID} is {str(hybrid).lower()}", never)


def _weights(given: Given) -> Results:
    """Convert the weights of (1 - penalty * [tool]) * accuracy + format of all turns + [tool]."""
    if not crops(given) or given.text(_FUNCTION) is not None:
        yield from (lacks(name, JUDGE) for name in _MINI_O3 if given.has(name))
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
        yield differs(
            "data.tool_call_penalty, data.use_tool_reward_weight",
            "they count for an executed call; in Mini-o3 also for one that was only written",
        )


REWARD_SETTINGS = tuple(Setting(name=name, by_rule=True, default=default) for name, default in _MINI_O3.items())
REWARD_RULES: tuple[Rule, ...] = (_scorer, _weights)
