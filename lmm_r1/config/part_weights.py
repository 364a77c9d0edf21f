"""`--reward.part_weights`: how much named parts of a reward count, step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.errors import UserError

FLAG = "--reward.part_weights"
BETWEEN_FACTORS = "*"
WEIGHT_PREFIX = "part_weight/"
"""Of the metrics that tell the weights of a step."""
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
    """The weight from the step behind the last of the schedule on."""
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
