"""Fields of nested dataclasses by dotted names, such as `actor.adam.lr`, and the nearest known name to a mistyped one."""

import dataclasses
import difflib
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

    Groups in front may be left out. The only name that begins so comes first, then the most similar one.
    """
    typed = name.replace(".", "_")
    tails: dict[str, str] = {}
    for known_name in known:
        words = known_name.split(".")
        for start in range(len(words)):
            tails.setdefault("_".join(words[start:]), known_name)
    begun = {known_name for tail, known_name in tails.items() if len(typed) > 1 and tail.startswith(typed)}
    if len(begun) == 1:
        return begun.pop()
    near = difflib.get_close_matches(typed, tails, n=1, cutoff=0.75)
    return tails[near[0]] if near else None
