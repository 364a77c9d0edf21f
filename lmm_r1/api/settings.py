"""The settings of a call: a dataclass, a YAML file or a mapping, read as the commands read theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import yaml

from lmm_r1 import dotted
from lmm_r1.cli.yaml_file import YamlError, parse_settings, read_settings
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
Settings: TypeAlias = "Config | Mapping[str, object] | str | os.PathLike[str]"
"""A dataclass of `lmm_r1.config`, a mapping of its settings (nested, by dotted names, or both), or the path of a YAML file."""


def read_config(config_class: type[Config], given: Settings[Config], *more: Mapping[str, object]) -> Config:
    """Return the settings as `config_class` has them, with what `more` says in their places, later mappings first.

    Raises:
        UserError: the file cannot be read, a name is unknown, or a value is of another type; the nearest name is told.
    """
    if isinstance(given, config_class):
        config, layers = given, more
    elif isinstance(given, Mapping):
        config, layers = config_class(), (given, *more)
    else:
        config, layers = dotted.replace(config_class(), _from_file(config_class, given)), more
    for layer in layers:
        config = dotted.replace(config, _from_mapping(config_class, layer))
    return config


def _from_file(config_class: type, path: object) -> dict[str, object]:
    if not isinstance(path, str | os.PathLike):
        raise UserError(
            f"config is a {type(path).__name__}; give a mapping of settings, the path of a YAML file, or a "
            f"{config_class.__name__}"
        )
    try:
        return read_settings(Path(path), dotted.leaf_types(config_class))
    except YamlError as error:
        raise UserError(str(error).removeprefix("--config ")) from error


def _from_mapping(config_class: type, settings: Mapping[str, object]) -> dict[str, object]:
    try:
        text = yaml.safe_dump(_plain(settings), sort_keys=False)
        return parse_settings(text, dotted.leaf_types(config_class), source=None)
    except yaml.representer.RepresenterError as error:
        raise UserError(
            f"config: {error.args[-1]!r} is no value of a setting; give a text, a number or a list"
        ) from error
    except YamlError as error:
        raise UserError(f"config: {error}") from error


def _plain(value: object) -> object:
    """Return a value as YAML can write it: paths, and what stands for one, as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
