"""Fields of nested dataclasses by dotted names, such as `actor.adam.lr`, and the nearest known name to a mistyped one."""

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


FIXED = "fixed"
"""In a field's annotation: it is no flag, and has its default unless code sets it."""


def leaf_types(config_class: type, *, prefix: str = "") -> dict[str, object]:
    """Return the type of every flag: of each field that is neither a group nor fixed, `{"actor.adam.lr": float, ...}`."""
    hints = typing.get_type_hints(config_class)
    marked = typing.get_type_hints(config_class, include_extras=True)
    leaves: dict[str, object] = {}
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        if FIXED in getattr(marked[field.name], "__metadata__", ()):
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            leaves |= leaf_types(hint, prefix=f"{prefix}{field.name}.")
        else:
            leaves[f"{prefix}{field.name}"] = hint
    return leaves


def is_switch(hint: object) -> bool:
    """Return whether a flag of this type needs no value: a bool, or a bool that may be None."""
    return hint in (bool, bool | None)


def get(config: object, name: str) -> object:
    """Return the value under a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def replace(config: Config, values: Mapping[str, object]) -> Config:
    """Return a copy of `config` with other `values`, by dotted names."""
    fields: dict[str, object] = {}
    groups: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        group, dot, rest = name.partition(".")
        if dot:
            groups.setdefault(group, {})[rest] = value
        else:
            fields[name] = value
    nested = {group: replace(getattr(config, group), inner) for group, inner in groups.items()}
    return dataclasses.replace(config, **fields, **nested)


def nearest(name: str, *, known: Iterable[str]) -> str | None:
    """Return the known name that was mistyped as `name`, None if none is near.

    Groups in front may be left out. The only name that begins so comes first, then the one with the fewest typing
    errors: one is allowed, and one more for every eight letters.
    """
    typed = name.replace(".", "_")
    most = max(len(typed) > 2, len(typed) // 8)
    begun: set[str] = set()
    near: list[tuple[int, int, str]] = []
    for known_name in known:
        words = known_name.split(".")
        for start in range(len(words)):
            tail = "_".join(words[start:])
            if len(typed) > 1 and tail.startswith(typed):
                begun.add(known_name)
            if abs(len(typed) - len(tail)) <= most and (errors := _typing_errors(typed, tail)) <= most:
                near.append((errors, start, known_name))
    if len(begun) == 1:
        return begun.pop()
    return min(near, key=lambda found: found[:2])[2] if near else None


def _typing_errors(one: str, other: str) -> int:
    """Return how many letters are added, left out, replaced, or swapped with the next (optimal string alignment)."""
    before, row = [0], list(range(len(other) + 1))
    for place, letter in enumerate(one):
        earlier, before, row = before, row, [place + 1]
        for at, theirs in enumerate(other):
            row.append(min(before[at + 1] + 1, row[at] + 1, before[at] + (letter != theirs)))
            if place and at and (letter, one[place - 1]) == (other[at - 1], theirs):
                row[-1] = min(row[-1], earlier[at - 1] + 1)
    return row[-1]
