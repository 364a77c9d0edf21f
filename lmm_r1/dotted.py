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


def leaf_types(config_class: type, *, prefix: str = "") -> dict[str, object]:
    """Return the type of every field that is not a group: `{"actor.adam.lr": float, ...}`."""
    hints = typing.get_type_hints(config_class)
    leaves: dict[str, object] = {}
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
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
    """Return the known name meant by `name`, None if none is near.

    The only one that begins with it comes first, then the most like it by the whole, then by its last dotted part.
    """
    names = list(known)
    begun = [known_name for known_name in names if name and known_name.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    if whole := difflib.get_close_matches(name, names, n=1):
        return whole[0]
    by_last_part = {known_name.rpartition(".")[2]: known_name for known_name in reversed(names)}
    last_part = difflib.get_close_matches(name.rpartition(".")[2], list(by_last_part), n=1)
    return by_last_part[last_part[0]] if last_part else None
