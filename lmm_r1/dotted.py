"""Fields of nested dataclasses under dotted names, as in `actor.adam.lr`."""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import TypeVar

Config = TypeVar("Config")


def leaf_types(config_class: type, *, prefix: str = "") -> dict[str, object]:
    """Return the type of every field that is no group itself: `{"actor.adam.lr": float, ...}`."""
    hints = typing.get_type_hints(config_class)
    leaves: dict[str, object] = {}
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            leaves |= leaf_types(hint, prefix=f"{prefix}{field.name}.")
        else:
            leaves[f"{prefix}{field.name}"] = hint
    return leaves


def get(config: object, name: str) -> object:
    """Return the value under a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def replace(config: Config, values: Mapping[str, object]) -> Config:
    """Return a copy of `config` with `values`, given by dotted names, in their places."""
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
