"""What each flag declares in its annotation: the values that it may have, and the flags without which it has no effect."""

from __future__ import annotations

import functools
import logging
import math
import operator
import re
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

from lmm_r1 import dotted
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_CONDITION = re.compile(r"(?P<name>[\w.]+)(?:(?P<sign>!=|=|>|~)(?P<values>\S+))?")
_COMPARISONS = {"(": (operator.gt, "above"), "[": (operator.ge, "at least")} | {
    ")": (operator.lt, "below"),
    "]": (operator.le, "at most"),
}


@dataclass(frozen=True)
class Within:
    """The interval of a number, or of each of several: `[0, 1)`."""

    interval: str
    besides: tuple[float, ...] = ()
    """Numbers outside with a meaning of their own."""
    rising: bool = False
    """Whether the first of two numbers must be below the second."""

    def refusal(self, value: object) -> str | None:
        """Return what a value must be; None if it is."""
        numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
        bounds = [
            (*_COMPARISONS[bracket], float(bound))
            for bracket, bound in zip(
                (self.interval[0], self.interval[-1]), self.interval[1:-1].split(","), strict=True
            )
        ]
        outside = [
            number
            for number in numbers
            if number not in self.besides and not all(holds(number, bound) for holds, _, bound in bounds)
        ]
        if outside:
            told = " and ".join(f"{words} {bound:g}" for _, words, bound in bounds if math.isfinite(bound))
            others = "".join(f", or {number:g}" for number in self.besides)
            return f"must be {told or 'a number'}{others}"
        if self.rising and len(numbers) == 2 and not numbers[0] < numbers[1]:
            return "must be two numbers of which the first is below the second"
        return None


@dataclass(frozen=True)
class Needs:
    """What a value other than the default has an effect with.

    A condition is a flag by its dotted name, or several with ` or ` between them. A dot in front makes it one of the same
    group, two dots one of the group above. `NAME` must be set, `NAME>0` above a number, `NAME=a|b` and `NAME!=a|b` one of
    these values or none of them, and `NAME~a` must list the value.
    """

    condition: str
    warns: bool = False
    """Whether the value is only reported: it changes no result, and scripts set it as a matter of routine."""

    def holds(self, config: object, *, group: str) -> bool:
        """Return whether the settings of a run fulfil it, for a flag of this group."""
        return any(_holds(dotted.get(config, name), sign, values) for name, sign, values in self.parts(group))

    def told(self, *, group: str, prefix: str) -> str:
        """Return what must hold, for a message."""
        return " or ".join(_told(f"{prefix}{name}", sign, values) for name, sign, values in self.parts(group))

    def parts(self, group: str) -> list[tuple[str, str | None, list[str]]]:
        """Return the name, the sign and the values of each condition, for a flag of this group."""
        found = []
        for part in self.condition.split(" or "):
            match = _CONDITION.fullmatch(part)
            assert match is not None, f"{part} is no condition"
            name = match["name"].lstrip(".")
            dots = len(match["name"]) - len(name)
            groups = group.split(".")[: 1 - dots or None] if dots and group else []
            found.append((".".join([*groups, name]), match["sign"], (match["values"] or "").split("|")))
        return found


def _holds(value: object, sign: str | None, values: list[str]) -> bool:
    if sign is None:
        return bool(value)
    if sign == ">":
        return isinstance(value, int | float) and value > float(values[0])
    if sign == "~":
        return isinstance(value, tuple) and values[0] in value
    return (str(value) in values) == (sign == "=")


def _told(name: str, sign: str | None, values: list[str]) -> str:
    names = " or ".join(value for value in values if value != "None")
    if sign is None or names == "True":
        return f"{name} is set"
    if names == "False":
        return f"{name} is off"
    return f"{name} {({'>': 'is above', '=': 'is', '!=': 'is not', '~': 'has'})[sign]} {names}"


@functools.cache
def declared(config_class: type) -> dict[str, tuple[object, ...]]:
    """Return by flag what it declares, and then what its groups do."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    found: dict[str, tuple[object, ...]] = {}
    for field in fields(config_class):
        own = getattr(hints[field.name], "__metadata__", ())
        hint = hints[field.name].__origin__ if own else hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            found |= {f"{field.name}.{flag}": (*said, *own) for flag, said in declared(hint).items()}
        else:
            found[field.name] = own
    return found


def check_ranges(config: DataclassInstance, *, prefix: str = "--") -> None:
    """Raise UserError for the first flag with a value that it cannot have; None is open."""
    for flag, said in declared(type(config)).items():
        value = dotted.get(config, flag)
        for one in said:
            if isinstance(one, Within) and value is not None and (refusal := one.refusal(value)):
                raise UserError(f"{given(flag, value, prefix=prefix)} {refusal}")


def has_effect(flag: str, config: DataclassInstance, *, or_warns: bool = False) -> bool:
    """Return whether a flag has an effect in the settings of a run, or is only reported if it has none."""
    needs = (one for one in declared(type(config))[flag] if isinstance(one, Needs) and not (or_warns and one.warns))
    return all(one.holds(config, group=flag.rpartition(".")[0]) for one in needs)


def check_needs(config: DataclassInstance, resolved: DataclassInstance, *, prefix: str = "--") -> None:
    """Raise UserError for the first flag that is set and has no effect.

    Args:
        config: as it was given.
        resolved: the same with what depends on other flags filled in.
    """
    defaults = _defaults(type(config))
    for flag, said in declared(type(config)).items():
        value, group = dotted.get(config, flag), flag.rpartition(".")[0]
        # An open switch that is off asks for nothing.
        if value == defaults[flag] or (value is False and defaults[flag] is None):
            continue
        unmet = [one for one in said if isinstance(one, Needs) and not one.holds(resolved, group=group)]
        if not unmet:
            continue
        sentence = (
            f"{given(flag, value, prefix=prefix)} has no effect unless {unmet[0].told(group=group, prefix=prefix)}"
        )
        if not unmet[0].warns:
            raise UserError(f"{sentence}; change that, or leave it out")
        logger.warning("%s", sentence)


def given(flag: str, value: object, *, prefix: str = "--") -> str:
    """Return a flag as somebody has set it: `--ds.lora.rank 8`, `--data.no_multiturn`."""
    group, dot, name = flag.rpartition(".")
    if isinstance(value, bool):
        return f"{prefix}{flag}" if value else f"{prefix}{group}{dot}no_{name}"
    shown = value if isinstance(value, tuple) else (value,)
    return " ".join([f"{prefix}{flag}", *(f"{one:g}" if isinstance(one, float) else str(one) for one in shown)])


@functools.cache
def _defaults(config_class: type) -> dict[str, object]:
    required = [one.name for one in fields(config_class) if one.default is one.default_factory is MISSING]
    config = config_class(**dict.fromkeys(required))
    return {flag: dotted.get(config, flag) for flag in declared(config_class)}
