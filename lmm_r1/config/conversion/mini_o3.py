"""Mini-o3's rollout with crops, which the environment `crop` plays: its settings as flags of episodes.

Defaults are those of its `ppo_trainer.yaml`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from lmm_r1.config.conversion.table import Flag, Given, Note, Rule
from lmm_r1.errors import UserError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CROPPING = "vllm_multi_turn_tool_call"
"""What Mini-o3 calls the rollout."""
IMAGES = f"{ROLLOUT}.limit_mm_per_prompt"
LONGEST = f"{ROLLOUT}.max_total_response_length"
ROOM = 2000
"""Tokens that Mini-o3 wants free behind a call and behind its observation."""
_STOPS = ["</grounding>"]
_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056}
"""Of images where Mini-o3's `data` has none."""

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
"""Of the settings that its other rollouts do not read."""

_OWN_WORDS = (
    "in the words of the environment; a subclass of CropEnvironment has others (explained, answered: docs/agents.md)"
)
UNLIKE: dict[str, tuple[object, str]] = {
    "data.tool_call": (
        "crop",
        "--train.agent crop has the tool crop; others are functions of a file (docs/agents.md)",
    ),
    "data.use_tgt_size": (False, "images are shown within the pixel bounds of --agent.options"),
    "data.mask_blank": (False, "a row of text needs no blank image here; leave it out of the row"),
    f"{ACTOR}.ignore_void": (False, "an episode without an answer pays what its scorer says, and is learnt from"),
    f"{ACTOR}.use_multi_turn_response_mask": (True, "what the policy is shown is never in the loss"),
    f"{ROLLOUT}.use_raw_image": (True, "parts are always cut out of the full resolution"),
    f"{ROLLOUT}.multi_turn_prompt_type": (None, f"observations are shown {_OWN_WORDS}"),
    f"{ROLLOUT}.stop": (_STOPS, "a turn ends where the environment says: behind </grounding> and </tool_call>"),
    f"{ROLLOUT}.save_traj": (False, "rollouts.jsonl has all turns of --logger.rollouts_per_step samples of a step"),
    f"{ROLLOUT}.save_traj_dir": (None, "rollouts.jsonl, with its pictures, is in --ckpt.output_dir"),
}
"""What happens here whatever is asked for: the value that asks for it, and what is told of others."""


def crops(given: Given) -> bool:
    """Say whether the policy's turns are answered with crops."""
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
    yield Flag("agent.options", json.dumps({"coordinates": coordinates, **pixels}))
    yield Note(
        "another meaning",
        "data.train_files",
        "paths of images start at $BASE_IMAGE_DIR there: give it as --data.image_dir",
    )
    if prompt:
        yield Note("another meaning", "data.system_prompt", f"the protocol is told in a system turn, {_OWN_WORDS}")


def _limits(given: Given) -> Iterator[Flag | Note]:
    """Rounds are turns of the policy; images count with that of the question, of which a row has one."""
    if not crops(given):
        return
    yield Flag("agent.max_turns", given.whole(f"{ROLLOUT}.max_generation_round"))
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
