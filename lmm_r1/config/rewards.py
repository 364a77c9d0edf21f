"""Where rewards come from, which verifier judges, and how the parts of a reward are weighted."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from lmm_r1.config.ppo import PPOConfig, RewardConfig
from lmm_r1.data.reading import NO_PROMPT
from lmm_r1.errors import UserError
from remote_rm.registry import VERIFIERS, verifier_class, verifier_with
from remote_rm.verifier import Item, Verifier

_FUNCTION = re.compile(r"(?P<path>[^,]+\.py)(:(?P<name>[A-Za-z_]\w*))?")
GIVEN = "python:"
"""In front of the name of a function that `lmm_r1.train_rl` was given itself."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A user's reward function, as the flags describe it."""

    path: str | None
    """The file; None if `lmm_r1.train_rl` got the function itself."""
    name: str | None
    """None takes the one that the file has of those known by name."""
    arguments: Mapping[str, object]
    """Keyword arguments in addition to the samples."""
    score_key: str | None
    """The part of its result that is the score; None takes what the function says is one, else the reward."""
    deadline_s: float
    """Seconds within which it must have scored the responses to one prompt."""
    flag: str = "--reward.remote_url"
    deadline_flag: str = "--reward.deadline_s"

    @property
    def told(self) -> str:
        """The flag and its value, for messages."""
        return f"{self.flag} {self.path or f'{GIVEN}{self.name}'}"


def named_verifier(reward: RewardConfig) -> str | None:
    """Return the verifier that gives the rewards, as `verifier_from` reads it; None if something else does.

    Raises UserError for settings that only requests to a server have.
    """
    spec = reward.remote_url or ""
    if spec.partition(":")[0] not in VERIFIERS:
        return None
    if reward.request_fields:
        raise UserError(
            f"--reward.request_fields {' '.join(reward.request_fields)} is for requests to a reward server, and "
            f"--reward.remote_url {spec} asks none; leave it out"
        )
    return spec


def reward_function(reward: RewardConfig) -> RewardFunction | None:
    """Return the function that gives the rewards; None if a server or a model does.

    Raises:
        UserError: settings of a function contradict others, or are no JSON.
    """
    path, name = file_and_name(reward.remote_url or "")
    if path is None and name is None:
        for flag in ("function_kwargs", "score_key"):
            if getattr(reward, flag) is not None:
                raise UserError(
                    f"--reward.{flag} {getattr(reward, flag)} is for a reward function: give one as "
                    f"--reward.remote_url FILE.py, not {reward.remote_url}"
                )
        return None
    if reward.request_fields:
        raise UserError(
            f"--reward.request_fields {' '.join(reward.request_fields)} is for requests to a reward server; a function "
            "takes what it has parameters for, so leave it out"
        )
    return RewardFunction(
        path=path,
        name=name,
        arguments=_arguments(reward.function_kwargs),
        score_key=reward.score_key,
        deadline_s=reward.deadline_s,
    )


def file_and_name(source: str) -> tuple[str | None, str | None]:
    """Return the file of a reward function, None for one that was given itself, and its name; both are None for others."""
    if source.startswith(GIVEN):
        return None, source.removeprefix(GIVEN)
    match = _FUNCTION.fullmatch(source)
    if match is None or source.startswith(("http://", "https://")):
        return None, None
    return match["path"], match["name"]


def _arguments(text: str | None) -> Mapping[str, object]:
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--reward.function_kwargs {text} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise UserError(f"--reward.function_kwargs {text} must be a JSON object, such as '{{\"weight\": 0.1}}'")
    return arguments


def format_prompt(config: PPOConfig) -> str | None:
    """Return the shipped system prompt for the format that a run's verifier pays, by itself or by `--reward.part_weights`.

    It is `none` if no format is paid, and None if something else than a verifier gives the rewards.
    """
    spec = None if config.train.plays else named_verifier(config.reward)
    if spec is None:
        return None
    weighted = any("format" in part.factors and max(part.start, part.end) > 0 for part in part_weights(config.reward))
    return prompt_for([spec], weighted=weighted, flag="--reward.remote_url")


def prompt_for(sources: Sequence[str], *, weighted: bool = False, flag: str = "--reward") -> str:
    """Return the shipped system prompt for the format that a verifier among some reward sources pays; `none` without any.

    `weighted` says that the part `format` of its scores is paid in addition; `flag` names the sources, for messages.
    """
    for spec in sources:
        if spec.partition(SETTINGS_SEPARATOR)[0] in VERIFIERS:
            responses = ("<think>?</think><answer>?</answer>", "?")
            items = (Item(prompt="", response=response, label="") for response in responses)
            kept, left_out = map(verifier_from(spec, flag=flag).failed_score, items)
            if weighted or kept.reward > left_out.reward:
                boxes = spec.startswith(("box", f"{COMPOSITION}:box")) and "xywh" not in spec
                return "think_box" if boxes else "think"
    return NO_PROMPT


SETTINGS_SEPARATOR = ":"
SELECT_PREFIX = "select."
COMPOSITION = "composition"

# A comma in front of no setting is part of a value, such as JSON.
_BETWEEN = re.compile(r",(?=\s*[A-Za-z_.]+\s*(?:[=,]|$))")


def verifier_from(spec: str, *, flag: str = "--reward") -> Verifier:
    """Return the verifier that `NAME` or `NAME:SETTING,SETTING` describes.

    A setting is a switch of the verifier (`list:unordered`, `exact:ignore_case`), or a flag of `serve_verifier NAME` with
    its value (`math:format_weight=0.1`, `llm_judge:judge_url=http://127.0.0.1:8000/v1,judge_model=m`). Those of a
    composition are its parts, `NAME=WEIGHT` or `NAME`; a part `select.NAME=WEIGHT` judges only the rows whose label opens
    with `NAME:`.

    Raises:
        UserError: the name, a setting or a part is unknown; the message begins with `flag`.
    """
    name, separator, settings = spec.partition(SETTINGS_SEPARATOR)
    given = [setting.strip() for setting in _BETWEEN.split(settings)] if separator else []
    try:
        return _composition(given) if name == COMPOSITION else _with_settings(name, given)
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
_SCHEDULE = ("from", "to", "steps")
_KEYS = ("weight", *_SCHEDULE, "shape", "at_most")
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
    if reward.part_weights is None:
        return ()
    try:
        given = json.loads(reward.part_weights, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise UserError(f"{FLAG} {reward.part_weights} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise UserError(f"{FLAG} {reward.part_weights} must be a JSON object, such as '{_EXAMPLE}'")
    weights = tuple(_part_weight(name, value) for name, value in given.items())
    known: dict[tuple[str, ...], str] = {}
    for weight in weights:
        same = known.setdefault(tuple(sorted(weight.factors)), weight.name)
        if same != weight.name:
            raise UserError(f"{FLAG} names one part twice, as {same!r} and {weight.name!r}; give it one weight")
    return weights


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; json itself would keep the last of two values of one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UserError(f"{FLAG} gives {', '.join(twice)} twice; leave one out")
    return found


def _part_weight(name: str, value: object) -> PartWeight:
    factors = tuple(factor.strip() for factor in name.split(BETWEEN_FACTORS))
    if not all(factors):
        raise UserError(f"{FLAG} names the part {name!r}; write a name, or a product such as 'accuracy * used_tool'")
    if not isinstance(value, dict):
        weight = _number(value, where=repr(name))
        return PartWeight(name=name, factors=factors, start=weight, end=weight)
    if unknown := [key for key in value if key not in _KEYS]:
        raise UserError(f"{FLAG} {name!r} has the unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    at_most = _number(value["at_most"], where=f"{name!r}, at_most") if "at_most" in value else math.inf
    if "weight" in value:
        if beside := [key for key in (*_SCHEDULE, "shape") if key in value]:
            raise UserError(f"{FLAG} {name!r} has weight and {', '.join(beside)}; give a constant or a schedule")
        weight = _number(value["weight"], where=f"{name!r}, weight")
        return PartWeight(name=name, factors=factors, start=weight, end=weight, at_most=at_most)
    if missing := [key for key in _SCHEDULE if key not in value]:
        raise UserError(f"{FLAG} {name!r} lacks {', '.join(missing)}; give a number, or for example {_EXAMPLE}")
    return PartWeight(
        name=name,
        factors=factors,
        start=_number(value["from"], where=f"{name!r}, from"),
        end=_number(value["to"], where=f"{name!r}, to"),
        steps=_steps(value["steps"], name=name),
        shape=_shape(value.get("shape"), name=name),
        at_most=at_most,
    )


def _number(value: object, *, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{FLAG} {where}: {value!r} is no finite number, and a weight is one, such as 0.5")
    return float(value)


def _steps(value: object, *, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{FLAG} {name!r}, steps: {value!r} must be a whole number from 1 up")
    return value


def _shape(value: object, *, name: str) -> Shape:
    if value is None:
        return PartWeight.shape
    for shape in get_args(Shape):
        if value == shape:
            return shape
    raise UserError(f"{FLAG} {name!r}, shape: {value!r} is none of {', '.join(get_args(Shape))}")
