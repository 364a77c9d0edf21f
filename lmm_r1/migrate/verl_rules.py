"""Conversion of verl's rewards, turns and tools, and of Mini-o3's variants of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Literal

from lmm_r1.config.ppo import DEFAULT_VERIFIER, AgentConfig
from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1 import lengths
from lmm_r1.migrate.easyr1_algorithm import batches, longest_sample
from lmm_r1.migrate.table import Flag, Given, Note, Rule, Setting

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CROPPING = "vllm_multi_turn_tool_call"
"""What Mini-o3 calls the rollout."""
IMAGES = f"{ROLLOUT}.limit_mm_per_prompt"
LONGEST = f"{ROLLOUT}.max_total_response_length"
ROOM = 2000
"""Tokens that Mini-o3 reserves after a call and after its observation."""
_STOPS = ["</grounding>"]
_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056}
"""Pixel bounds of images if Mini-o3's `data` has none."""

DEFAULTS: dict[str, object] = {
    "data.tool_call": "crop",
    "data.use_tgt_size": False,
    "data.mask_blank": False,
    f"{ACTOR}.ignore_exceed": False,
    f"{ACTOR}.ignore_void": False,
    f"{ACTOR}.use_multi_turn_response_mask": False,
    f"{ROLLOUT}.max_generation_round": 1,
    f"{ROLLOUT}.val_max_generation_round": 1,
    f"{ROLLOUT}.val_limit_mm_per_prompt": {"image": 1},
    LONGEST: 32768,
    f"{ROLLOUT}.use_raw_image": False,
    f"{ROLLOUT}.use_relative_coordinates": False,
    f"{ROLLOUT}.multi_turn_prompt_type": None,
    f"{ROLLOUT}.stop": _STOPS,
    f"{ROLLOUT}.save_traj": False,
    f"{ROLLOUT}.save_traj_dir": None,
}
"""Defaults of settings that Mini-o3's other rollouts do not read."""

_OWN_WORDS = (
    'in the words of the environment; for those that its checkpoints were trained with, add "prompts": '
    '"Mini-o3/verl/trainer/constants.py" to --agent.options (docs/agents.md)'
)
UNLIKE: dict[str, tuple[object, str]] = {
    "data.tool_call": (
        "crop",
        "--train.agent crop has the tool crop; others are functions of a file (docs/agents.md)",
    ),
    "data.use_tgt_size": (False, "images are shown within the pixel bounds of --agent.options"),
    "data.mask_blank": (False, "a row of text needs no blank image here; leave it out of the row"),
    f"{ACTOR}.ignore_void": (False, "an episode without an answer gets the reward of its scorer, and is trained on"),
    f"{ACTOR}.use_multi_turn_response_mask": (True, "what the policy is shown is never in the loss"),
    f"{ROLLOUT}.use_raw_image": (True, "parts are always cut out of the full resolution"),
    f"{ROLLOUT}.multi_turn_prompt_type": (None, f"observations are shown {_OWN_WORDS}"),
    f"{ROLLOUT}.stop": (_STOPS, "the environment ends a turn: after </grounding> and </tool_call>"),
    f"{ROLLOUT}.save_traj": (False, "rollouts.jsonl has all turns of --logger.rollouts_per_step samples of a step"),
    f"{ROLLOUT}.save_traj_dir": (None, "rollouts.jsonl, with its pictures, is in --ckpt.output_dir"),
}
"""Settings with one behaviour here: the value that asks for it, and the note on other values."""


def crops(given: Given) -> bool:
    """Return whether an environment answers the policy's turns with crops."""
    return given.text(f"{ROLLOUT}.name") == CROPPING


def _environment(given: Given) -> Iterator[Flag | Note]:
    prompt = given["data.system_prompt"]
    if not crops(given):
        if prompt:
            yield Note(
                "without counterpart", "data.system_prompt", "a name there; give its text by --data.system_prompt"
            )
        return
    yield Flag("train.agent", "crop")
    coordinates = "relative" if given.switch(f"{ROLLOUT}.use_relative_coordinates") else "absolute"
    pixels = {
        bound: default if given[f"data.{bound}"] is None else given.whole(f"data.{bound}")
        for bound, default in _PIXELS.items()
    }
    # Boxes become pixels as in its tool.
    cut = {"edges": "clamp", "rounding": "down"}
    yield Flag("agent.options", json.dumps({"coordinates": coordinates, **cut, **pixels}))
    yield Note(
        "another meaning",
        "data.train_files",
        "paths of images start at $BASE_IMAGE_DIR there: give it as --data.image_dir",
    )
    if prompt:
        yield Note("another meaning", "data.system_prompt", f"the protocol is in a system turn, {_OWN_WORDS}")


def _limits(given: Given) -> Iterator[Flag | Note]:
    """Rounds are turns of the policy; images count with that of the question, of which a row has one."""
    if not crops(given):
        return
    yield Flag("agent.max_turns", given.whole(f"{ROLLOUT}.max_generation_round"))
    most = _most_images(given, IMAGES)
    yield Flag("data.max_images_per_prompt", 1)
    yield Flag("agent.max_images", most - 1)
    yield Note(
        "derived", IMAGES, f"{most} images with that of the question: --agent.max_images {most - 1} in addition to it"
    )


def _most_images(given: Given, setting: str) -> int:
    most = given.group(setting).get("image", 1)
    if not isinstance(most, int) or most < 1:
        raise UserError(f"{setting}: image is {most!r}, and must be a whole number from 1 up")
    return most


def _evaluation(given: Given) -> Iterator[Flag | Note]:
    if not crops(given):
        return
    rounds, images = f"{ROLLOUT}.val_max_generation_round", f"{ROLLOUT}.val_limit_mm_per_prompt"
    turns = given.whole(rounds)
    # With one round there, evaluation has the limits of training, too.
    if turns == 1:
        if given.has(images):
            yield Note("without counterpart", images, f"Mini-o3 itself does not read it with {rounds} 1")
        return
    for flag, setting, theirs, ours in (
        ("max_turns", rounds, turns, given.whole(f"{ROLLOUT}.max_generation_round")),
        ("max_images", images, _most_images(given, images) - 1, _most_images(given, IMAGES) - 1),
    ):
        if theirs != ours:
            yield Note(
                "without counterpart",
                setting,
                f"evaluation during training has the limits of training, --agent.{flag} {ours}; for others: `lmm-r1 "
                f"evaluate --agent crop --agent_{flag} {theirs}`",
            )


def _over_turn(given: Given) -> Iterator[Flag | Note]:
    """What becomes of an episode that a limit ends."""
    if not crops(given):
        return
    masks = given.switch(f"{ACTOR}.ignore_exceed")
    yield Flag("agent.overturn", "mask" if masks else "keep")
    if masks:
        yield Note(
            "another meaning",
            f"{ACTOR}.ignore_exceed",
            "the group is compared without such an episode; Mini-o3's code leaves its reward in the group's mean",
        )


RULES: tuple[Rule, ...] = (_environment, _limits, _evaluation, _over_turn)


MULTI_TURN = f"{ROLLOUT}.multi_turn"
_ENABLE = f"{MULTI_TURN}.enable"
_TOOLS = (f"{MULTI_TURN}.tool_config_path", f"{MULTI_TURN}.function_tool_path")
_ANSWERED_BY = (*_TOOLS, f"{MULTI_TURN}.interaction_config_path", f"{ROLLOUT}.agent.agent_loop_config_path")
"""Files by which verl knows who answers a turn: tools, a simulated user, or a loop of the user's own."""
_LONGEST_TEXT, _CUT_SIDE = f"{MULTI_TURN}.max_tool_response_length", f"{MULTI_TURN}.tool_response_truncate_side"

_DEFAULTS: dict[str, object] = {
    **dict.fromkeys(_ANSWERED_BY),
    f"{MULTI_TURN}.max_assistant_turns": None,
    f"{MULTI_TURN}.max_user_turns": None,
    f"{MULTI_TURN}.max_parallel_calls": 1,
    _LONGEST_TEXT: 256,
    _CUT_SIDE: "middle",
    f"{MULTI_TURN}.format": "hermes",
    f"{MULTI_TURN}.use_inference_chat_template": False,
}
"""Settings that matter only with an environment."""
_UNLIKE: dict[str, tuple[object, str]] = {
    f"{MULTI_TURN}.max_parallel_calls": (
        1,
        "one call of a turn is carried out; a subclass of ToolEnvironment has more (calls_per_turn: docs/agents.md)",
    ),
    f"{MULTI_TURN}.format": (
        "hermes",
        "calls are written as in Hermes; a subclass of ToolEnvironment has others (formats: docs/agents.md)",
    ),
    f"{MULTI_TURN}.use_inference_chat_template": (
        False,
        "each turn is read on by the ids that were generated, with its thoughts",
    ),
}
"""As `mini_o3.UNLIKE`."""


def player(given: Given) -> Literal["crop", "file"] | None:
    """Say who answers the policy's turns: the environment `crop`, one that the user has to write, or nobody."""
    if crops(given):
        return "crop"
    return "file" if given.switch(_ENABLE) and any(map(given.text, _ANSWERED_BY)) else None


def _unlike(given: Given) -> Iterator[Flag | Note]:
    """Settings that nobody reads, and wishes that episodes have no flag for."""
    playing = player(given)
    for who, defaults, unlike, needed in (
        ("crop", DEFAULTS, UNLIKE, f"{ROLLOUT}.name {CROPPING}"),
        ("file", _DEFAULTS, _UNLIKE, f"{_ENABLE} and a file that says who answers"),
    ):
        for name, default in defaults.items():
            if playing != who:
                if given.has(name) and given[name] != default:
                    yield Note("without counterpart", name, f"of use only with {needed}")
            elif name in unlike and given[name] != unlike[name][0]:
                yield Note("without counterpart", name, unlike[name][1])


def _turns_environment(given: Given) -> Iterator[Flag | Note]:
    name = given.text(f"{ROLLOUT}.name")
    if name not in (None, "vllm", CROPPING):
        yield Note("without counterpart", f"{ROLLOUT}.name", f"vLLM generates, not {name}")
    if not given.switch(_ENABLE):
        return
    if crops(given):
        yield Note("without counterpart", _ENABLE, f"of no use together with {ROLLOUT}.name {CROPPING}")
        return
    named = {setting: path for setting in _ANSWERED_BY if (path := given.text(setting))}
    if named:
        yield from _file(given, named)
        return
    answers = ", ".join(_ANSWERED_BY)
    yield Note(
        "without counterpart",
        _ENABLE,
        f"without one of {answers} nobody answers a turn: responses of one turn are trained",
    )


def _file(given: Given, named: Mapping[str, str]) -> Iterator[Flag | Note]:
    """Yield the flag of an environment that replaces verl's classes, in a file next to the first one named."""
    setting, *others = named
    ours = str(PurePosixPath(named[setting]).with_suffix(".py"))
    written = "the tools as functions in a list TOOLS" if setting in _TOOLS else "who answers as a class Environment"
    yield Flag("train.agent", ours)
    yield Note(
        "another meaning", setting, f"verl's classes are not loaded: write {written} of {ours} (docs/agents.md)"
    )
    for other in others:
        yield Note("without counterpart", other, f"one environment answers, that of {ours}; write both there")
    if setting in _TOOLS:
        length, side = given.whole(_LONGEST_TEXT), given.text(_CUT_SIDE)
        yield Note(
            "without counterpart",
            f"{_LONGEST_TEXT}, {_CUT_SIDE}",
            f"a longer text of a tool is cut to {length} characters there ({side}); cut it in the function",
        )


def _turn_limits(given: Given) -> Iterator[Flag | Note]:
    """What limits end, verl learns from as from any other episode."""
    if player(given) != "file":
        return
    yield Flag("agent.overturn", "keep")
    # Behind the last answer the policy has one more turn.
    bounds = {f"{MULTI_TURN}.max_assistant_turns": 0, f"{MULTI_TURN}.max_user_turns": 1}
    turns = [given.whole(name) + more for name, more in bounds.items() if given[name] is not None]
    most = min(turns, default=longest_sample(given) // 3)
    why = "the policy's turns, one more than the user's" if turns else "no limit there, and a third of all tokens here"
    yield Flag("agent.max_turns", most)
    yield Note("derived", ", ".join(bounds), f"--agent.max_turns {most}: {why}")
    images = AgentConfig.max_images
    yield Note("another meaning", _ENABLE, f"an episode also ends at --agent.max_images, {images} if it is left out")


def _lengths(given: Given) -> Iterator[Flag | Note]:
    playing, response = player(given), given.whole("data.max_response_length")
    if playing is None:
        yield from lengths(given)
        return
    longest = _longest(given)
    yield Flag("data.max_len", longest)
    yield Flag("rollout.max_new_tokens", response)
    both = (
        f"--data.max_len {longest} is of an episode with its prompt, --rollout.max_new_tokens {response} of one turn"
    )
    if playing == "crop":
        yield Note(
            "another meaning",
            f"data.max_response_length, {LONGEST}",
            f"{both}; it ends where an observation leaves no token of them, and there where a call or an observation "
            f"leaves {ROOM} or fewer",
        )
    else:
        yield Note("another meaning", "data.max_prompt_length, data.max_response_length", both)


def _longest(given: Given) -> int:
    return given.whole(LONGEST) if crops(given) else longest_sample(given)


def _batches(given: Given) -> Iterator[Flag | Note]:
    yield from batches(given, longest=_longest(given))


TURN_SETTINGS = tuple(
    Setting(name=name, by_rule=True, default=default)
    for name, default in {
        **DEFAULTS,
        **_DEFAULTS,
        "data.system_prompt": False,
        f"{ROLLOUT}.name": None,
        _ENABLE: False,
        IMAGES: {"image": 1},
    }.items()
)
TURN_RULES: tuple[Rule, ...] = (*RULES, _turns_environment, _turn_limits, _unlike)
IN_PLACE: Mapping[Rule, Rule] = {lengths: _lengths, batches: _batches}
"""EasyR1's rules of one response, and those that know episodes, too."""


ADDRESS = "http://127.0.0.1:5000/get_reward"
"""Default of `lmm-r1 serve_verifier`."""
JUDGE = (
    "a verifier judges here: --reward.remote_url names one, or the address of one that `lmm-r1 serve_verifier` starts"
)
_FUNCTION = "custom_reward_function.path"
_HYBRID = "reward_model.use_hybrid_reward_manager"
_SCORERS = {True: "data.gpt_general_qa_reward_fn", False: "data.general_qa_reward_fn"}
"""Which scorer Mini-o3 asks, by whether it is `_HYBRID`."""
_CHOICE = "general_qa_tool_mc"
_MINI_O3: dict[str, object] = {
    "data.acc_reward_weight": 1.0,
    "data.format_reward_weight": 1.0,
    "data.use_tool_reward_weight": 0.0,
    "data.tool_call_penalty": 0.1,
    _HYBRID: True,
    _SCORERS[True]: "general_qa_tool",
    _SCORERS[False]: "v1",
}


def _scorer(given: Given) -> Iterator[Flag | Note]:
    """An environment without rewards of its own needs a scorer of its last turn."""
    model = given.text("reward_model.model.path") if given["reward_model.enable"] else None
    if model is not None:
        yield Flag("reward.model_name_or_path", model)
        return
    if given.has("reward_model.model.path"):
        yield Note("without counterpart", "reward_model.model.path", "it has no effect without reward_model.enable")
    if given.text(_FUNCTION) is not None:
        return
    if player(given) != "crop":
        yield Flag("reward.remote_url", DEFAULT_VERIFIER)
        yield Note(
            "another meaning", _FUNCTION, "without one verl judges a row by its data_source, and here math judges all"
        )
        return
    hybrid, accuracy = given.switch(_HYBRID), given.number("data.acc_reward_weight")
    asked, never = _SCORERS[hybrid], _SCORERS[not hybrid]
    scorer = given.text(asked)
    if scorer == _CHOICE:
        yield Flag("reward.remote_url", f"choice:accuracy_weight={accuracy:g},format_weight=0")
    else:
        yield Flag("reward.remote_url", ADDRESS)
        yield Note(
            "another meaning",
            asked,
            f"{scorer} is a service here: start `lmm-r1 serve_verifier llm_judge --accuracy-weight {accuracy:g} "
            "--format-weight 0 --judge-url URL --judge-model MODEL`, and give as --reward.remote_url where all machines "
            "reach it",
        )
    if given.has(never):
        yield Note("without counterpart", never, f"nobody asks it with {_HYBRID} {str(hybrid).lower()}")


def _weights(given: Given) -> Iterator[Flag | Note]:
    """(1 - penalty * [tool]) * accuracy + format of all turns + [tool], each with its weight."""
    if not crops(given) or given.text(_FUNCTION) is not None:
        yield from (Note("without counterpart", name, JUDGE) for name in _MINI_O3 if given.has(name))
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
        yield Note(
            "another meaning",
            "data.tool_call_penalty, data.use_tool_reward_weight",
            "they count for a call that was carried out; there for one that was written, too",
        )


REWARD_SETTINGS = tuple(Setting(name=name, by_rule=True, default=default) for name, default in _MINI_O3.items())
REWARD_RULES: tuple[Rule, ...] = (_scorer, _weights)
