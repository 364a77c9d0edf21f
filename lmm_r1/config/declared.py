"""What each flag declares in its annotation: the values that it may have, and the flags without which it has no effect."""

from __future__ import annotations

import functools
import json
import logging
import math
import operator
import re
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, NewType

from lmm_r1 import dotted
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

JsonText = NewType("JsonText", str)
"""A JSON object as text; in a YAML file it may also be a mapping."""
REGEX = "regular expression"
"""In a flag's annotation: its text is one."""
_CONDITION = re.compile(r"(?P<no>!)?(?P<name>[\w.]+)(?:(?P<sign>!=|=|>|~)(?P<values>\S+))?")
_COMPARISONS = {"(": (operator.gt, "above"), "[": (operator.ge, "at least")} | {
    ")": (operator.lt, "below"),
    "]": (operator.le, "at most"),
}


@dataclass(frozen=True)
class ArgumentPlace:
    """Marks an argument without a flag, which has its place on the command line."""

    shown: str | None = None
    """What the usage shows; None is its name, or its choices."""


Value = typing.TypeVar("Value")
Positional = typing.Annotated[Value, ArgumentPlace()]
"""An argument without a flag: `file: Positional[str]`."""


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
        sides = zip((self.interval[0], self.interval[-1]), self.interval[1:-1].split(","), strict=True)
        bounds = [(*_COMPARISONS[bracket], float(bound)) for bracket, bound in sides]
        bounded = (number for number in numbers if number not in self.besides)
        if not all(holds(number, bound) for number in bounded for holds, _, bound in bounds):
            told = " and ".join(f"{words} {bound:g}" for _, words, bound in bounds if math.isfinite(bound))
            if bounds[0][2] == bounds[1][2]:
                told = f"{bounds[0][2]:g}"
            others = "".join(f", or {number:g}" for number in self.besides)
            return f"must be {told or 'a number'}{others}"
        if self.rising and len(numbers) == 2 and not numbers[0] < numbers[1]:
            return "must be two numbers of which the first is below the second"
        return None


@dataclass(frozen=True)
class Needs:
    """What a value other than the default needs.

    A condition is a flag by its dotted name, or several with ` or ` between them. A dot in front makes it one of the same
    group, two dots one of the group above. `NAME` must be set, `!NAME` must not, `NAME>0` above a number, `NAME=a|b` and
    `NAME!=a|b` one of these values or none of them, and `NAME~a` must list the value. A flag that a command does not have is None.
    """

    condition: str
    because: str = ""
    """Why, for the message; empty: the value has no effect otherwise."""
    when: str = ""
    """The values that need it, with | between them, the default among them or not."""
    warns: bool = False
    """Whether the value is only reported: it changes no result, and scripts set it as a matter of routine."""

    def holds(self, config: object, *, group: str) -> bool:
        """Return whether the settings of a run fulfil it, for a flag of this group."""
        return any(_holds(_value(config, name), sign, values) for name, sign, values in self.parts(group))

    def told(self, config: object, *, group: str, prefix: str) -> str:
        """Return what must hold, for a message."""
        known = dotted.leaf_types(type(config))
        return " or ".join(
            _told(f"{prefix}{name}", sign, values) for name, sign, values in self.parts(group) if name in known
        )

    def parts(self, group: str) -> list[tuple[str, str | None, list[str]]]:
        """Return the name, the sign and the values of each condition, for a flag of this group."""
        found = []
        for part in self.condition.split(" or "):
            match = _CONDITION.fullmatch(part)
            assert match is not None, f"{part} is no condition"
            values = (match["values"] or "").split("|")
            found.append((_full(match["name"], group), match["sign"] or match["no"], values))
        return found


@dataclass(frozen=True)
class Below:
    """The flags of which the first that is set is a number that this one must be below."""

    flags: str
    or_equal: bool = False

    def refusal(self, value: object, config: object, *, group: str, prefix: str) -> str | None:
        """Return what a value must be; None if it is."""
        names = [_full(name, group) for name in self.flags.split(" or ")]
        bound, name = next(((bound, name) for name in names if (bound := _value(config, name))), (None, ""))
        if not isinstance(bound, int) or not isinstance(value, int | float):
            return None
        if value < bound or (self.or_equal and value == bound):
            return None
        return f"must be {'at most' if self.or_equal else 'below'} {prefix}{name} {bound}"


def _full(name: str, group: str) -> str:
    """Return the dotted name of a flag that one of a group names with dots in front."""
    bare = name.lstrip(".")
    dots = len(name) - len(bare)
    return ".".join([*(group.split(".")[: 1 - dots or None] if dots and group else []), bare])


def _value(config: object, name: str) -> object:
    try:
        return dotted.get(config, name)
    except AttributeError:
        return None


def _holds(value: object, sign: str | None, values: list[str]) -> bool:
    if sign in (None, "!"):
        return bool(value) == (sign is None)
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
    if sign == "!" or not names:
        return f"{name} is not set"
    return f"{name} {({'>': 'is above', '=': 'is', '!=': 'is not', '~': 'has'})[sign]} {names}"


@functools.cache
def declared(config_class: type) -> dict[str, tuple[object, ...]]:
    """Return by flag what it declares, and then what its groups do."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    found: dict[str, tuple[object, ...]] = {}
    for field in fields(config_class):
        own = getattr(hints[field.name], "__metadata__", ())
        if dotted.FIXED in own:
            continue
        hint = hints[field.name].__origin__ if own else hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            found |= {f"{field.name}.{flag}": (*said, *own) for flag, said in declared(hint).items()}
        else:
            found[field.name] = own
    return found


def check_ranges(config: DataclassInstance, *, prefix: str = "--") -> None:
    """Raise UserError for the first flag with a value that it cannot have; None is open."""
    hints = dotted.leaf_types(type(config))
    for flag, said in declared(type(config)).items():
        value = dotted.get(config, flag)
        if value is None:
            continue
        refusals = [one.refusal(value) for one in said if isinstance(one, Within)]
        is_union = typing.get_origin(hints[flag]) in (typing.Union, types.UnionType)
        members = typing.get_args(hints[flag]) if is_union else (hints[flag],)
        kinds = [kind for kind in members if kind is not type(None)]
        choices = typing.get_args(kinds[0]) if len(kinds) == 1 else ()
        if choices and typing.get_origin(kinds[0]) is typing.Literal and value not in choices:
            refusals.append(f"must be one of {', '.join(map(str, choices))}")
        if JsonText in kinds:
            json_object(str(value), flag=f"{prefix}{flag}")
        if REGEX in said:
            try:
                re.compile(str(value))
            except re.error as error:
                refusals.append(f"is no regular expression ({error}); correct it")
        for refusal in filter(None, refusals):
            raise UserError(f"{given(flag, value, prefix=prefix)} {refusal}")


def json_object(text: str | None, *, flag: str) -> dict[str, object]:
    """Return the JSON object in a flag's text, empty without one; raises UserError for another text."""
    try:
        found = json.loads(text or "{}", object_pairs_hook=_once)
    except ValueError as error:
        raise UserError(f"{flag} {text} is no JSON ({error}); give an object in quotes") from error
    if not isinstance(found, dict):
        raise UserError(f"{flag} {text} must be a JSON object, such as '{{\"weight\": 0.5}}'")
    return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it gives a key twice")
    return found


def has_effect(flag: str, config: DataclassInstance, *, or_warns: bool = False) -> bool:
    """Return whether a flag has an effect in the settings of a run.

    Args:
        or_warns: whether one that is reported, or refused because of another one, counts, too.
    """
    needs = (one for one in declared(type(config))[flag] if isinstance(one, Needs) and not one.when)
    counted = (one for one in needs if not (or_warns and (one.warns or one.because)))
    return all(one.holds(config, group=flag.rpartition(".")[0]) for one in counted)


def check_needs(config: DataclassInstance, resolved: DataclassInstance, *, prefix: str = "--") -> None:
    """Raise UserError for the first flag that is set and has no effect, or contradicts another one.

    Args:
        config: as it was given.
        resolved: the same with what depends on other flags filled in.
    """
    defaults = _defaults(type(config))
    for flag, said in declared(type(config)).items():
        value, group = dotted.get(resolved, flag), flag.rpartition(".")[0]
        own = dotted.get(config, flag)
        # An open switch that is off asks for nothing.
        is_set = own != defaults[flag] and not (own is False and defaults[flag] is None)
        for one in said:
            if isinstance(one, Below) and value is not None and has_effect(flag, resolved):
                if refusal := one.refusal(value, resolved, group=group, prefix=prefix):
                    raise UserError(f"{given(flag, value, prefix=prefix)} {refusal}; change one of them")
            if not isinstance(one, Needs) or one.holds(resolved, group=group):
                continue
            applies = str(value) in one.when.split("|") if one.when else is_set
            if not applies or (one.because and value is None):
                continue
            told = one.told(resolved, group=group, prefix=prefix)
            named = given(flag, value if one.when else own, prefix=prefix)
            if one.warns:
                logger.warning("%s has no effect unless %s", named, told)
                break
            if one.because:
                raise UserError(f"{named} requires that {told}: {one.because}; change that, or leave it out")
            raise UserError(f"{named} has no effect unless {told}; change that, or leave it out")


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
