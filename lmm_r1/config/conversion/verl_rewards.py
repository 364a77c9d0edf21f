"""What Mini-o3's settings of the reward are here: a verifier, and the weights of its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lmm_r1.config.conversion.mini_o3 import crops
from lmm_r1.config.conversion.table import Flag, Given, Note, Rule, Setting
from lmm_r1.config.conversion.verl_turns import player
from lmm_r1.config.ppo import DEFAULT_VERIFIER

ADDRESS = "http://127.0.0.1:5000/get_reward"
"""Of `lmm-r1 serve_verifier`, where nothing else is asked for."""
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
    if player(given) is None or given.text(_FUNCTION) is not None:
        return
    if player(given) == "file":
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
