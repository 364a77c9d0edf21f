"""What each flag is for: the docstring under its field."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from types import MappingProxyType

HELP = "help"


def attach_help(config_class: type) -> None:
    """Put the docstring under each field, of nested groups too, into the field's metadata, where tyro looks first.

    tyro finds them by itself, but searches a module's source again for every class in it: 0.3 s for 170 flags.
    """
    hints = typing.get_type_hints(config_class)
    texts = {name: text for base in reversed(config_class.__mro__) for name, text in _class_texts(base).items()}
    for field in dataclasses.fields(config_class):
        if HELP not in field.metadata and field.name in texts:
            field.metadata = MappingProxyType({**field.metadata, HELP: texts[field.name]})
        if dataclasses.is_dataclass(hints[field.name]):
            attach_help(hints[field.name])


def help_of(config_class: type, flag: str) -> str:
    """Return what a flag is for, by its dotted name, after `attach_help`; empty where nothing stands under its field."""
    *groups, name = flag.split(".")
    for group in groups:
        config_class = typing.get_type_hints(config_class)[group]
    (field,) = (field for field in dataclasses.fields(config_class) if field.name == name)
    return field.metadata.get(HELP, "")


def _class_texts(config_class: type) -> dict[str, str]:
    return _module_texts(config_class.__module__).get(config_class.__qualname__, {})


@functools.cache
def _module_texts(module_name: str) -> dict[str, dict[str, str]]:
    """Return the docstring under each annotated name of each class at the top of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    except (OSError, TypeError):  # no source: a built-in module, or a class typed in at a prompt
        return {}
    return {node.name: _texts(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(class_node: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for statement, following in zip(class_node.body, class_node.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts
