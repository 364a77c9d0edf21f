"""What each flag is for: the docstring under its field."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
from types import MappingProxyType
from typing import TYPE_CHECKING

import tyro

from lmm_r1 import dotted
from lmm_r1.config.shared import JsonText

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from lmm_r1.config.shared import Example, FirstHelp


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


_WORDS: dict[object, str] = {int: "INT", float: "FLOAT", str: "TEXT", JsonText: "JSON"}
# Wider lines are hard to read.
_WIDEST = 100


def first_page(defaults: DataclassInstance, first: FirstHelp, *, prog: str, description: str) -> str:
    """Return the page, as wide as the terminal.

    Args:
        defaults: what each flag is where it is not given.
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    flags = dotted.leaf_types(type(defaults))
    parts = [f"usage: {prog} [FLAGS]", textwrap.fill(description, width), "Examples:"]
    parts += [_shown(example, prog=prog, width=width) for example in first.examples]
    parts.append(f"{len(first.flags)} flags that most runs give:")
    parts += [_told(defaults, flag, flags[flag], width=width) for flag in first.flags]
    parts.append(f"`{prog} --help-all` lists all {len(flags)} flags.")
    return "\n\n".join(parts)


def _shown(example: Example, *, prog: str, width: int) -> str:
    """Return an example with its flags and their values in lines that a shell reads as one."""
    lines = [f"  {prog}"]
    for flag in re.split(" (?=--)", example.arguments):
        # Two for the sign that the command goes on.
        if len(lines[-1]) + 1 + len(flag) > width - 2:
            lines.append(f"      {flag}")
        else:
            lines[-1] += f" {flag}"
    return f"  # {example.what}\n" + " \\\n".join(lines)


def _told(defaults: object, flag: str, hint: object, *, width: int) -> str:
    default = dotted.get(defaults, flag)
    said = "required" if default is tyro.MISSING else f"default: {_as_typed(default)}"
    head, choices = f"  --{flag} {value_name(hint)}".rstrip(), ""
    if len(head) > width:
        head, choices = f"  --{flag} NAME", f"One of {', '.join(map(str, typing.get_args(hint)))}. "
    text = " ".join(f"{choices}{help_of(type(defaults), flag)} ({said})".split())
    indent = " " * 8
    return f"{head}\n" + textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _as_typed(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def value_name(hint: object) -> str:
    """Return what stands for the value of a flag of this type: `FLOAT`, `{a,b}`, `TEXT ...`; nothing for a switch."""
    if dotted.is_switch(hint):
        return ""
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return value_name(parameters[0])
    if origin in (typing.Union, types.UnionType):
        return value_name(next(member for member in parameters if member is not type(None)))
    if origin is typing.Literal:
        return f"{{{','.join(map(str, parameters))}}}"
    if origin is tuple:
        last = parameters[-1] is Ellipsis
        return f"{value_name(parameters[0])} ..." if last else " ".join(map(value_name, parameters))
    return _WORDS.get(hint, "PATH")
