"""Mini-o3's and verl's settings of several turns as flags of episodes: who answers a turn, and how far they go.

Mini-o3 has a rollout of its own for its crops, which the environment `crop` plays. verl loads tools by a file that names
its own classes: what they do has to be written as functions once. Defaults are those of `ppo_trainer.yaml` and `rollout.yaml`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Literal

from lmm_r1.config.conversion.easyr1_algorithm import batches, longest_sample
from lmm_r1.config.conversion.easyr1_rules import lengths
from lmm_r1.config.conversion.table import Flag, Given, Note, Rule, Setting
from lmm_r1.errors import UserError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
MINI_O3 = "vllm_multi_turn_tool_call"
"""What Mini-o3 calls the rollout with its crops."""
IMAGES = f"{ROLLOUT}.limit_mm_per_prompt"
_ROOM = 2000
"""Tokens that Mini-o3 wants free behind a call and behind its observation."""
_STOPS = ["</grounding>"]
_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056}
"""Of images where Mini-o3's `data` has none."""

_CROP: dict[str, object] = {
    "data.tool_call": "crop",
    "data.use_tgt_size": False,
    "data.mask_blank": False,
    f"{ACTOR}.ignore_exceed": False,
    f"{ACTOR}.ignore_void": False,
    f"{ACTOR}.use_multi_turn_response_mask": False,
    f"{ROLLOUT}.max_generation_round": 1,
    f"{ROLLOUT}.val_max_generation_round": 1,
    f"{ROLLOUT}.val_limit_mm_per_prompt": {"image": 1},
    f"{ROLLOUT}.max_total_response_length": 32768,
    f"{ROLLOUT}.use_raw_image": False,
    f"{ROLLOUT}.use_relative_coordinates": False,
    f"{ROLLOUT}.multi_turn_prompt_type": None,
    f"{ROLLOUT}.stop": _STOPS,
    f"{ROLLOUT}.save_traj": False,
    f"{ROLLOUT}.save_traj_dir": None,
}
"""Mini-o3's settings of episodes, which its other rollouts do not read."""

_ANSWERED_BY = (
    f"{MULTI_TURN}.tool_config_path",
    f"{MULTI_TURN}.function_tool_path",
    f"{MULTI_TURN}.interaction_config_path",
    f"{ROLLOUT}.agent.agent_loop_config_path",
)
"""Files by which verl knows who answers a turn: tools, a simulated user, or a loop of the user's own."""
_FILE: dict[str, object] = {
    **dict.fromkeys(_ANSWERED_BY),
    f"{MULTI_TURN}.max_assistant_turns": None,
    f"{MULTI_TURN}.max_user_turns": None,
    f"{MULTI_TURN}.max_parallel_calls": 1,
    f"{MULTI_TURN}.max_tool_response_length": 256,
    f"{MULTI_TURN}.tool_response_truncate_side": "middle",
    f"{MULTI_TURN}.format": "hermes",
    f"{MULTI_TURN}.use_inference_chat_template": False,
}
"""verl's settings of episodes, which are of use with somebody who answers."""

_OWN_WORDS = "in words of the environment; those of a subclass of CropEnvironment are yours (explained, answered in docs/agents.md)"
_UNLIKE: dict[str, tuple[object, str]] = {
    "data.tool_call": ("crop", "crop is what --train.agent crop has; other tools are functions of its option tools"),
    "data.use_tgt_size": (False, "images are shown within the pixel bounds of --agent.options"),
    "data.mask_blank": (False, "a row of text alone needs no blank image; leave it out of the rows"),
    f"{ACTOR}.ignore_void": (False, "an episode without an answer pays what its scorer says, and is learnt from"),
    f"{ACTOR}.use_multi_turn_response_mask": (True, "what the policy is shown is never in the loss"),
    f"{ROLLOUT}.use_raw_image": (True, "parts are cut out of the full resolution"),
    f"{ROLLOUT}.multi_turn_prompt_type": (None, f"observations are shown {_OWN_WORDS}"),
    f"{ROLLOUT}.stop": (_STOPS, "a turn ends where the environment says: behind </grounding> and </tool_call>"),
    f"{ROLLOUT}.save_traj": (
        False,
        "rollouts.jsonl and the report have all turns of --logger.rollouts_per_step samples",
    ),
    f"{ROLLOUT}.save_traj_dir": (None, "rollouts.jsonl, with its pictures, is in --ckpt.output_dir"),
    f"{MULTI_TURN}.max_parallel_calls": (
        1,
        "one call of a turn is carried out; a subclass has others (calls_per_turn)",
    ),
    f"{MULTI_TURN}.format": (
        "hermes",
        "calls are written as in Hermes; a subclass of ToolEnvironment has other formats",
    ),
    f"{MULTI_TURN}.use_inference_chat_template": (
        False,
        "each turn is read on as it was generated, with its thoughts, by the same ids",
    ),
}
"""What episodes do here whatever is asked for: the value that asks for it, and what is told of others."""


def player(given: Given) -> Literal["crop", "file"] | None:
    """Say who answers the policy's turns: the environment `crop`, one that the user has to write, or nobody."""
    if given.text(f"{ROLLOUT}.name") == MINI_O3:
        return "crop"
    return "file" if given.switch(f"{MULTI_TURN}.enable") and any(map(given.text, _ANSWERED_BY)) else None


def _played(given: Given) -> Mapping[str, object]:
    """Return the settings, with their defaults, that episodes of this run read."""
    playing = player(given)
    return {} if playing is None else {"crop": _CROP, "file": _FILE}[playing]


def _unlike(given: Given) -> Iterator[Flag | Note]:
    """Settings that nobody reads, and wishes that episodes have no flag for."""
    played = _played(given)
    for settings, needed in (
        (_CROP, f"{ROLLOUT}.name {MINI_O3}"),
        (_FILE, f"{MULTI_TURN}.enable and a file that says who answers"),
    ):
        for name, default in settings.items():
            if name not in played:
                if given.has(name) and given[name] != default:
                    yield Note("without counterpart", name, f"of use with {needed} alone")
            elif name in _UNLIKE and given[name] != _UNLIKE[name][0]:
                yield Note("without counterpart", name, _UNLIKE[name][1])


def _environment(given: Given) -> Iterator[Flag | Note]:
    name = given.text(f"{ROLLOUT}.name")
    if name not in (None, "vllm", MINI_O3):
        yield Note("without counterpart", f"{ROLLOUT}.name", f"vLLM generates, not {name}")
    if player(given) == "crop":
        yield Flag("train.agent", "crop")
        coordinates = "relative" if given.switch(f"{ROLLOUT}.use_relative_coordinates") else "absolute"
        pixels = {
            bound: default if given[f"data.{bound}"] is None else given.whole(f"data.{bound}")
            for bound, default in _PIXELS.items()
        }
        yield Flag("agent.options", json.dumps({"coordinates": coordinates, **pixels}))
        yield Note(
            "another meaning",
            "data.train_files",
            "paths of images start at $BASE_IMAGE_DIR: give it as --data.image_dir",
        )
        if given.switch(f"{MULTI_TURN}.enable"):
            yield Note("without counterpart", f"{MULTI_TURN}.enable", f"of no use beside {ROLLOUT}.name {MINI_O3}")
    elif given.switch(f"{MULTI_TURN}.enable"):
        yield from _file(given)
    prompt = given["data.system_prompt"]
    if prompt and player(given) == "crop":
        yield Note("another meaning", "data.system_prompt", f"a system turn tells the protocol {_OWN_WORDS}")
    elif prompt:
        yield Note("without counterpart", "data.system_prompt", "a name there; give the text as --data.system_prompt")


def _file(given: Given) -> Iterator[Flag | Note]:
    """An environment in the place of verl's classes, in a file beside the one that names them."""
    named = [name for name in _ANSWERED_BY if given.text(name)]
    if not named:
        yield Note(
            "without counterpart",
            f"{MULTI_TURN}.enable",
            f"nobody answers a turn without one of {', '.join(_ANSWERED_BY)}; responses of one turn are trained",
        )
        return
    setting, *others = named
    for other in others:
        yield Note("without counterpart", other, f"one environment answers, that of {setting}; put both into its file")
    path = given.text(setting)
    assert path is not None, "it was named by its text"
    ours = str(PurePosixPath(path).with_suffix(".py"))
    tools = setting in _ANSWERED_BY[:2]
    written = "the tools as functions in a list TOOLS" if tools else "who answers as a class Environment"
    yield Flag("train.agent", ours)
    yield Note(
        "another meaning", setting, f"verl's classes are not loaded: write {written} of {ours} (docs/agents.md)"
    )
    if tools:
        length = given.whole(f"{MULTI_TURN}.max_tool_response_length")
        side = given.text(f"{MULTI_TURN}.tool_response_truncate_side")
        yield Note(
            "without counterpart",
            f"{MULTI_TURN}.max_tool_response_length, {MULTI_TURN}.tool_response_truncate_side",
            f"a longer text of a tool is cut to {length} characters there ({side}); cut it in the function",
        )


def _most_turns(given: Given) -> Iterator[Flag | Note]:
    if player(given) == "crop":
        yield Flag("agent.max_turns", given.whole(f"{ROLLOUT}.max_generation_round"))
        yield from _images(given)
        yield from _evaluation(given)
    elif player(given) == "file":
        # After its last answer the policy has one more turn.
        bounds = {f"{MULTI_TURN}.max_assistant_turns": 0, f"{MULTI_TURN}.max_user_turns": 1}
        turns = [given.whole(name) + more for name, more in bounds.items() if given[name] is not None]
        most = min(turns, default=longest_sample(given) // 3)
        yield Flag("agent.max_turns", most)
        yield Note(
            "derived",
            ", ".join(bounds),
            (
                f"--agent.max_turns {most}: the policy's turns, of which there is one more than turns of the user"
                if turns
                else f"without a limit, a third of the tokens, as verl has it: --agent.max_turns {most}"
            ),
        )
        yield Note(
            "another meaning",
            f"{MULTI_TURN}.enable",
            "--agent.max_images ends an episode, too, and is 12 where it is left out",
        )


def _images(given: Given) -> Iterator[Flag | Note]:
    """Mini-o3 counts the image of the question, of which a row has one, with those that are cut out."""
    most = _most_images(given, IMAGES)
    yield Flag("data.max_images_per_prompt", 1)
    yield Flag("agent.max_images", most - 1)
    yield Note("derived", IMAGES, f"{most} images with that of the question: --agent.max_images {most - 1} beside it")


def _most_images(given: Given, setting: str) -> int:
    most = given.group(setting).get("image", 1)
    if not isinstance(most, int) or most < 1:
        raise UserError(f"{setting}: image is {most!r}, and must be a whole number from 1 up")
    return most


def _evaluation(given: Given) -> Iterator[Flag | Note]:
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
    if player(given) == "file":
        yield Flag("agent.overturn", "keep")
    if player(given) != "crop":
        return
    masks = given.switch(f"{ACTOR}.ignore_exceed")
    yield Flag("agent.overturn", "mask" if masks else "keep")
    if masks:
        yield Note(
            "another meaning",
            f"{ACTOR}.ignore_exceed",
            "the group is compared without such an episode, as in Mini-o3's paper; its code leaves the reward in the "
            "group's mean",
        )


def _lengths(given: Given) -> Iterator[Flag | Note]:
    playing, response = player(given), given.whole("data.max_response_length")
    if playing is None:
        yield from lengths(given)
        return
    yield Flag("data.max_len", _longest(given))
    yield Flag("rollout.max_new_tokens", response)
    if playing == "crop":
        yield Note(
            "another meaning",
            f"data.max_response_length, {ROLLOUT}.max_total_response_length",
            f"--rollout.max_new_tokens {response} is of a turn, --data.max_len {_longest(given)} of an episode with its "
            f"prompt; there it ends where a call or observation leaves less than {_ROOM} tokens of them, here none",
        )
    else:
        yield Note(
            "another meaning",
            "data.max_prompt_length, data.max_response_length",
            f"--data.max_len {_longest(given)} is prompt and all turns together, of which one turn may be "
            f"--rollout.max_new_tokens {response}",
        )


def _longest(given: Given) -> int:
    crops = player(given) == "crop"
    return given.whole(f"{ROLLOUT}.max_total_response_length") if crops else longest_sample(given)


def _batches(given: Given) -> Iterator[Flag | Note]:
    yield from batches(given, longest=_longest(given))


TURN_SETTINGS = tuple(
    Setting(name=name, by_rule=True, default=default)
    for name, default in {
        **_CROP,
        **_FILE,
        "data.system_prompt": False,
        f"{ROLLOUT}.name": None,
        f"{MULTI_TURN}.enable": False,
        IMAGES: {"image": 1},
    }.items()
)
TURN_RULES: tuple[Rule, ...] = (_environment, _most_turns, _over_turn, _unlike)
IN_PLACE: Mapping[Rule, Rule] = {lengths: _lengths, batches: _batches}
"""EasyR1's rules of one response, and those that know episodes, too."""
