"""Where rewards come from, which verifier judges, and how the parts of a reward are weighted."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from lmm_r1.config.declared import json_object
from lmm_r1.config.ppo import PPOConfig, RewardConfig
from lmm_r1.data.messages import NO_PROMPT
from lmm_r1.errors import UserError
from remote_rm.registry import VERIFIERS, verifier_class, verifier_with
from remote_rm.verifier import Item, Score, Verifier

GIVEN = "python:"
"""In front of the name of a function that a function of `lmm_r1` was given itself."""
_FUNCTION = re.compile(rf"{GIVEN}(?P<given>[^,=]+)|(?P<path>[^,]+\.py)(:(?P<name>[A-Za-z_]\w*))?")
GivenFunctions: TypeAlias = Mapping[str, Callable[..., Any]]
"""Reward functions that are not in a file, by name."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A user's reward function, as the flags describe it."""

    path: str | None = None
    """The file; None if `lmm_r1.train_rl` got the function itself."""
    name: str | None = None
    """None takes the one that the file has of those known by name."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments in addition to the samples."""
    score_key: str | None = None
    """The part of its result that is the score; None takes what the function says is one, else the reward."""
    deadline_s: float = RewardConfig.deadline_s
    """Seconds within which it must have scored the responses to one prompt."""
    flag: str = "--reward.remote_url"
    deadline_flag: str | None = "--reward.deadline_s"

    @property
    def told(self) -> str:
        """The flag and its value, for messages."""
        return f"{self.flag} {self.path or f'{GIVEN}{self.name}'}"

    def of(self, source: str) -> RewardFunction:
        """Return another function with the same settings."""
        path, name = file_and_name(source)
        return dataclasses.replace(self, path=path, name=name)


def named_verifier(reward: RewardConfig) -> str | None:
    """Return the verifier or verifiers that give the rewards, as `verifier_from` reads them; None if others do."""
    spec = reward.remote_url or ""
    return spec if all(map(_is_verifier, reward_sources(spec, flag="--reward.remote_url"))) else None


def reward_functions(reward: RewardConfig) -> tuple[RewardFunction, ...]:
    """Return the functions among the rewards; raises UserError for settings that contradict others or are no JSON."""
    spec = reward.remote_url or ""
    sources = [source for source in reward_sources(spec, flag="--reward.remote_url") if is_function(source)]
    for flag in ("function_kwargs", "score_key") if len(sources) != 1 else ():
        if getattr(reward, flag) is not None:
            raise UserError(
                f"--reward.{flag} {getattr(reward, flag)} is for a reward function: give one as "
                f"--reward.remote_url FILE.py, not {reward.remote_url}"
            )
    if reward.request_fields and (sources or named_verifier(reward) is not None):
        raise UserError(
            f"--reward.request_fields {' '.join(reward.request_fields)} is for requests to a reward server, and "
            f"--reward.remote_url {spec} asks none; leave it out"
        )
    arguments = json_object(reward.function_kwargs, flag="--reward.function_kwargs")
    own = RewardFunction(arguments=arguments, score_key=reward.score_key, deadline_s=reward.deadline_s)
    return tuple(own.of(source) for source in sources)


def file_and_name(source: str) -> tuple[str | None, str | None]:
    """Return the file of a reward function, None for one that was given itself, and its name; both are None for others."""
    match = _FUNCTION.fullmatch(source)
    if match is None or source.startswith(("http://", "https://")):
        return None, None
    return match["path"], match["given"] or match["name"]


def is_function(source: str) -> bool:
    """Return whether a reward is a function, in a file or given itself."""
    return file_and_name(source) != (None, None)


@dataclass(frozen=True, kw_only=True)
class ListedReward:
    """A verifier or a function in a list of rewards."""

    source: str
    """As `--reward` names it alone."""
    weight: float

    @property
    def name(self) -> str:
        """What it is logged as: `math`, `reward/length`, or `reward/FILE.py` for a function without a name."""
        path, name = file_and_name(self.source)
        return f"reward/{name or Path(path or '').name}" if is_function(self.source) else self.source

    def value(self, score: Score) -> float:
        """Return what is weighted: the reward of a function, the score of a verifier, whose own weights do not count."""
        return score.reward if is_function(self.source) else score.score


def reward_list(spec: str, *, flag: str = "--reward") -> tuple[ListedReward, ...]:
    """Return the parts of `NAME=WEIGHT,FILE.py:FUNCTION=WEIGHT,...`; empty for a single reward without a weight.

    Raises UserError for an unknown part, a weight that is no number, and two parts of one name.
    """
    single = is_function(spec) or spec.partition(SETTINGS_SEPARATOR)[0] in VERIFIERS
    if single or spec.startswith(("http://", "https://")) or not {",", "="} & set(spec):
        return ()
    try:
        parts = tuple(_listed(text.strip()) for text in spec.split(","))
        names = [part.name for part in parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is given twice; give each part once, and functions different names")
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UserError(f"{flag} {spec}: {error}") from error
    return parts


def _listed(text: str) -> ListedReward:
    from remote_rm.answer_verifier import finite_number
    from remote_rm.composition import part_from

    # A path may hold the sign, too.
    source, equals, weight = (text, "", "") if is_function(text) else text.rpartition("=")
    part = ListedReward(source=source if equals else text, weight=finite_number(weight) if equals else 1.0)
    name, settings, _ = part.source.partition(SETTINGS_SEPARATOR)
    if settings and name in VERIFIERS:
        raise ValueError(f"{part.source}: a verifier in a list takes no settings; name it alone, or as {name}")
    if not is_function(part.source):
        try:
            part_from(part.source)
        except ValueError as error:
            hint = "" if part.source in VERIFIERS else "; a function is written FILE.py:NAME"
            raise ValueError(f"{error}{hint}") from error
    return part


def reward_sources(spec: str, *, flag: str = "--reward") -> list[str]:
    """Return the parts of a list without their weights, or what is named alone."""
    return [part.source for part in reward_list(spec, flag=flag)] or [spec]


def check_reward(spec: str, *, flag: str) -> None:
    """Raise UserError unless this is a verifier, a function that is given or in an existing file, or a list of them."""
    sources = reward_sources(spec, flag=flag)
    for source in sources:
        path, _ = file_and_name(source)
        if path is not None and not Path(path).is_file():
            raise UserError(f"{flag} {source}: no such file; check the path")
    if not any(map(is_function, sources)):
        verifier_from(spec, flag=flag)


def columns_of(rewards: Sequence[str]) -> tuple[str, ...]:
    """Return the rewards with the parts of each list in front of it: what an evaluation shows."""
    return tuple(dict.fromkeys(one for spec in rewards for one in (*reward_sources(spec), spec)))


def format_prompt(config: PPOConfig) -> str | None:
    """Return the shipped system prompt for the format that a run's rewards pay, by themselves or by `--reward.part_weights`.

    It is `none` if no format is paid, and None if no verifier is among the rewards.
    """
    spec, flag = config.reward.remote_url or "", "--reward.remote_url"
    if config.train.plays or not any(map(_is_verifier, reward_sources(spec, flag=flag))):
        return None
    weighted = any("format" in part.factors and max(part.start, part.end) > 0 for part in part_weights(config.reward))
    return prompt_for([spec], weighted=weighted, flag=flag)


def prompt_for(rewards: Sequence[str], *, weighted: bool = False, flag: str = "--reward") -> str:
    """Return the shipped system prompt for the format that a verifier among some rewards pays; `none` without any.

    `weighted` says that the part `format` of its scores is paid in addition; `flag` names the rewards, for messages.
    """
    for spec in rewards:
        sources = reward_sources(spec, flag=flag)
        if any(map(is_function, sources)):
            pays = weighted or any(one.source == "format" and one.weight > 0 for one in reward_list(spec, flag=flag))
        elif pays := all(map(_is_verifier, sources)):
            responses = ("<think>?</think><answer>?</answer>", "?")
            items = (Item(prompt="", response=response, label="") for response in responses)
            kept, left_out = map(verifier_from(spec, flag=flag).failed_score, items)
            pays = weighted or kept.reward > left_out.reward
        if pays:
            boxes = any(source.startswith(("box", f"{COMPOSITION}:box")) for source in sources) and "xywh" not in spec
            return "think_box" if boxes else "think"
    return NO_PROMPT


def _is_verifier(source: str) -> bool:
    return source.partition(SETTINGS_SEPARATOR)[0] in VERIFIERS


SETTINGS_SEPARATOR = ":"
SELECT_PREFIX = "select."
COMPOSITION = "composition"

# A comma in front of no setting is part of a value, such as JSON.
_BETWEEN = re.compile(r",(?=\s*[A-Za-z_.]+\s*(?:[=,]|$))")


def verifier_from(spec: str, *, flag: str = "--reward") -> Verifier:
    """Return the verifier that `NAME`, `NAME:SETTING,SETTING` or a list of verifiers describes.

    A setting is a switch of the verifier (`list:unordered`, `exact:ignore_case`), or a flag of `serve_verifier NAME` with
    its value (`math:format_weight=0.1`, `llm_judge:judge_url=http://127.0.0.1:8000/v1,judge_model=m`). Those of a
    composition are its parts, `NAME=WEIGHT` or `NAME`; a part `select.NAME=WEIGHT` judges only the rows whose label opens
    with `NAME:`.

    Raises:
        UserError: the name, a setting or a part is unknown; the message begins with `flag`.
    """
    listed = [f"{part.source}={part.weight}" for part in reward_list(spec, flag=flag)]
    name, separator, settings = spec.partition(SETTINGS_SEPARATOR)
    given = [setting.strip() for setting in _BETWEEN.split(settings)] if separator else []
    try:
        return _composition(listed or given) if listed or name == COMPOSITION else _with_settings(name, given)
    except ValueError as error:
        raise UserError(f"{flag} {spec}: {error}") from error


def _with_settings(name: str, given: list[str]) -> Verifier:
    settings: dict[str, object] = {}
    switches = [field.name for field in dataclasses.fields(verifier_class(name)) if field.default is False]
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals and key not in switches:
            known = f"its settings are {', '.join(switches)}" if switches else "it has no settings"
            raise ValueError(f"{name} has no setting {setting!r}; {known}")
        settings[key.strip()] = value.strip() if equals else True
    return verifier_with(name, settings)


def _composition(given: list[str]) -> Verifier:
    from remote_rm.composition import Composition, part_from

    return Composition(
        parts=tuple(part_from(text) for text in given if not text.startswith(SELECT_PREFIX)),
        select=tuple(part_from(text.removeprefix(SELECT_PREFIX)) for text in given if text.startswith(SELECT_PREFIX)),
    )


FLAG = "--reward.part_weights"
BETWEEN_FACTORS = "*"
WEIGHT_PREFIX = "part_weight/"
"""Prefix of the metrics with the weights of a step."""
Shape: TypeAlias = Literal["linear", "cosine", "step"]
_SCHEDULE = {"from", "to", "steps"}
_EXAMPLE = '{"format": 0.5, "tool_calls": {"from": 0.2, "to": 0, "steps": 100}}'


@dataclass(frozen=True, kw_only=True)
class WeightedPart:
    """A part of a reward, or a product of parts, with its weight in one step."""

    name: str
    """As the flag has it."""
    factors: tuple[str, ...]
    weight: float
    at_most: float = math.inf
    """More than this counts as this, before it is weighted."""

    @property
    def metric(self) -> str:
        """What its weight is logged as, in letters that every tracker takes."""
        return f"{WEIGHT_PREFIX}{' x '.join(self.factors)}"

    def earned(self, parts: Mapping[str, float]) -> float:
        """Return what it adds to a reward with these parts, all factors among them."""
        return self.weight * min(math.prod(parts[factor] for factor in self.factors), self.at_most)


@dataclass(frozen=True, kw_only=True)
class PartWeight:
    """A part of a reward, or a product of parts, with its weight over all steps."""

    name: str
    factors: tuple[str, ...]
    start: float
    """The weight in the first step."""
    end: float
    """The weight after the last step of the schedule."""
    steps: int = 1
    """How many steps lie before that."""
    shape: Shape = "linear"
    at_most: float = math.inf

    def at(self, step: int) -> WeightedPart:
        """Return the part with its weight in a step, counted from 1."""
        passed = min((step - 1) / self.steps, 1.0)
        if self.shape == "step":
            passed = math.floor(passed)
        elif self.shape == "cosine":
            passed = (1 - math.cos(math.pi * passed)) / 2
        weight = self.start + (self.end - self.start) * passed
        return WeightedPart(name=self.name, factors=self.factors, weight=weight, at_most=self.at_most)


def part_weights(reward: RewardConfig) -> tuple[PartWeight, ...]:
    """Return the weights of `--reward.part_weights` in its order; raises UserError for what is none."""
    weights = tuple(_part_weight(name, value) for name, value in json_object(reward.part_weights, flag=FLAG).items())
    known: dict[tuple[str, ...], str] = {}
    for weight in weights:
        same = known.setdefault(tuple(sorted(weight.factors)), weight.name)
        if same != weight.name:
            raise UserError(f"{FLAG} names one part twice, as {same!r} and {weight.name!r}; give it one weight")
    return weights


def _part_weight(name: str, value: object) -> PartWeight:
    factors = tuple(factor.strip() for factor in name.split(BETWEEN_FACTORS))
    if not all(factors):
        raise UserError(f"{FLAG} names the part {name!r}; write a name, or a product such as 'accuracy * used_tool'")
    given: dict[str, Any] = value if isinstance(value, dict) else {"weight": value}
    needed, others = ({"weight"}, {"at_most"}) if "weight" in given else (_SCHEDULE, {"shape", "at_most"})
    if not needed <= given.keys() <= needed | others:
        raise UserError(
            f"{FLAG} {name!r} has the keys {', '.join(given) or 'of no weight'}; give a number, weight with or without "
            f"at_most, or a schedule, for example {_EXAMPLE}"
        )
    shape = given.get("shape", PartWeight.shape)
    if shape not in get_args(Shape):
        raise UserError(f"{FLAG} {name!r}, shape: {shape!r} is none of {', '.join(get_args(Shape))}")
    numbers = {key: number for key, number in given.items() if key != "shape"}
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise UserError(f"{FLAG} {name!r}, {key}: {number!r} is no finite number; give one, such as 0.5")
    steps = numbers.get("steps", 1)
    if steps < 1 or steps % 1:
        raise UserError(f"{FLAG} {name!r}, steps: {steps!r} must be a whole number from 1 up")
    return PartWeight(
        name=name,
        factors=factors,
        start=float(numbers["weight" if "weight" in numbers else "from"]),
        end=float(numbers["weight" if "weight" in numbers else "to"]),
        steps=int(steps),
        shape=shape,
        at_most=float(numbers.get("at_most", math.inf)),
    )
