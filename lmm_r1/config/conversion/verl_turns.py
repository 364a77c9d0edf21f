"""verl's settings of several turns as flags of episodes: who answers a turn, and how far they go.

verl loads tools by a file that names its own classes: what they do has to be written as functions once. Defaults are those
of its `rollout.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Literal

from lmm_r1.config.conversion import mini_o3
from lmm_r1.config.conversion.easyr1_algorithm import batches, longest_sample
from lmm_r1.config.conversion.easyr1_rules import lengths
from lmm_r1.config.conversion.mini_o3 import ROLLOUT
from lmm_r1.config.conversion.table import Flag, Given, Note, Rule, Setting
from lmm_r1.config.ppo import AgentConfig

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
"""Of the settings that are of use where somebody answers."""
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
    if mini_o3.crops(given):
        return "crop"
    return "file" if given.switch(_ENABLE) and any(map(given.text, _ANSWERED_BY)) else None


def _unlike(given: Given) -> Iterator[Flag | Note]:
    """Settings that nobody reads, and wishes that episodes have no flag for."""
    playing = player(given)
    for who, defaults, unlike, needed in (
        ("crop", mini_o3.DEFAULTS, mini_o3.UNLIKE, f"{ROLLOUT}.name {mini_o3.CROPPING}"),
        ("file", _DEFAULTS, _UNLIKE, f"{_ENABLE} and a file that says who answers"),
    ):
        for name, default in defaults.items():
            if playing != who:
                if given.has(name) and given[name] != default:
                    yield Note("without counterpart", name, f"of use with {needed} alone")
            elif name in unlike and given[name] != unlike[name][0]:
                yield Note("without counterpart", name, unlike[name][1])


def _environment(given: Given) -> Iterator[Flag | Note]:
    name = given.text(f"{ROLLOUT}.name")
    if name not in (None, "vllm", mini_o3.CROPPING):
        yield Note("without counterpart", f"{ROLLOUT}.name", f"vLLM generates, not {name}")
    if not given.switch(_ENABLE):
        return
    if mini_o3.crops(given):
        yield Note("without counterpart", _ENABLE, f"of no use beside {ROLLOUT}.name {mini_o3.CROPPING}")
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
    """An environment in the place of verl's classes, in a file beside the first that names them."""
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


def _limits(given: Given) -> Iterator[Flag | Note]:
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
    yield Note(
        "another meaning", _ENABLE, f"an episode also ends at --agent.max_images, {images} where it is left out"
    )


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
            f"data.max_response_length, {mini_o3.LONGEST}",
            f"{both}; it ends where an observation leaves no token of them, and there where a call or an observation "
            f"leaves {mini_o3.ROOM} or fewer",
        )
    else:
        yield Note("another meaning", "data.max_prompt_length, data.max_response_length", both)


def _longest(given: Given) -> int:
    return given.whole(mini_o3.LONGEST) if mini_o3.crops(given) else longest_sample(given)


def _batches(given: Given) -> Iterator[Flag | Note]:
    yield from batches(given, longest=_longest(given))


TURN_SETTINGS = tuple(
    Setting(name=name, by_rule=True, default=default)
    for name, default in {
        **mini_o3.DEFAULTS,
        **_DEFAULTS,
        "data.system_prompt": False,
        f"{ROLLOUT}.name": None,
        _ENABLE: False,
        mini_o3.IMAGES: {"image": 1},
    }.items()
)
TURN_RULES: tuple[Rule, ...] = (*mini_o3.RULES, _environment, _limits, _unlike)
IN_PLACE: Mapping[Rule, Rule] = {lengths: _lengths, batches: _batches}
"""EasyR1's rules of one response, and those that know episodes, too."""
