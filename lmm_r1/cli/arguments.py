"""Command-line flags and YAML files read into the frozen dataclass of a command, and its help."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
import typing
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lmm_r1 import dotted
from lmm_r1.cli.yaml_file import YamlError, read_settings, read_texts
from lmm_r1.config.declared import ArgumentPlace, JsonText
from lmm_r1.config.differences import only_defaults
from lmm_r1.dotted import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from lmm_r1.config.shared import FirstHelp


def help_of(config_class: type, flag: str) -> str:
    """Return the docstring below a flag or a group, by its dotted name; empty without one."""
    *groups, name = flag.split(".")
    for group in groups:
        config_class = typing.get_type_hints(config_class)[group]
    texts = (_module_texts(base.__module__).get(base.__qualname__, {}) for base in config_class.__mro__)
    return next((own[name] for own in texts if name in own), "")


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


# The value of a flag that must be given.
_REQUIRED: Any = object()
_WORDS: dict[object, str] = {int: "INT", float: "FLOAT", str: "TEXT", JsonText: "JSON"}
# Wider lines are hard to read.
_WIDEST = 100


def help_page(defaults: DataclassInstance, first: FirstHelp | None, *, prog: str, description: str) -> str:
    """Return the page, as wide as the terminal.

    Args:
        defaults: the value of each flag that is not set.
        first: the examples and flags to show; None shows all flags.
    """
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    flags, placed = dotted.leaf_types(type(defaults)), positionals(type(defaults))
    usage = " ".join(["usage:", prog, *placed.values(), *(["[FLAGS]"] if len(flags) > len(placed) else [])])
    parts = [usage, textwrap.fill(description, width)]
    if first is None:
        for group, names in itertools.groupby(flags, key=lambda flag: flag.partition(".")[0] if "." in flag else ""):
            parts += [f"{group}: {help_of(type(defaults), group)}".rstrip()] if group else []
            parts += [_told(defaults, flag, flags[flag], width=width, place=placed.get(flag)) for flag in names]
        return "\n\n".join(parts)
    parts += ["Examples:", *(_shown(*example, prog=prog, width=width) for example in first.examples.items())]
    parts.append("The ten most used flags:")
    parts += [_told(defaults, flag, flags[flag], width=width) for flag in first.flags.split()]
    parts.append(f"`{prog} --help-all` lists all {len(flags)} flags.")
    return "\n\n".join(parts)


def positionals(config_class: type) -> dict[str, str]:
    """Return what stands in the usage for each argument that has no flag."""
    found = {}
    for name, hint in typing.get_type_hints(config_class, include_extras=True).items():
        marks = typing.get_args(hint)
        for mark in marks[1:]:
            if isinstance(mark, ArgumentPlace):
                choices = value_name(marks[0]) if typing.get_origin(marks[0]) is typing.Literal else name.upper()
                found[name] = mark.shown or choices
    return found


def _shown(what: str, arguments: str, *, prog: str, width: int) -> str:
    """Return an example with its flags and their values in lines that a shell reads as one."""
    lines = [f"  {prog}"]
    for flag in re.split(" (?=--)", arguments):
        # Two characters for the backslash at the end of the line.
        if len(lines[-1]) + 1 + len(flag) > width - 2:
            lines.append(f"      {flag}")
        else:
            lines[-1] += f" {flag}"
    return f"  # {what}\n" + " \\\n".join(lines)


def _told(defaults: object, flag: str, hint: object, *, width: int, place: str | None = None) -> str:
    default = dotted.get(defaults, flag)
    said = "required" if default is _REQUIRED else f"default: {_as_typed(default)}"
    head, choices = f"  {place or f'--{flag} {value_name(hint)}'}".rstrip(), ""
    if dotted.is_switch(hint) and default is not False:
        group, dot, last = flag.rpartition(".")
        head += f" | --{group}{dot}no_{last}"
    if len(head) > width:
        head, choices = f"  --{flag} NAME", f"One of {value_name(hint).strip('{}').replace(',', ', ')}. "
    text = " ".join(f"{choices}{help_of(type(defaults), flag)} ({said})".split())
    indent = " " * 8
    return f"{head}\n" + textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _as_typed(value: object) -> str:
    return (" ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "none"


def value_name(hint: object) -> str:
    """Return the placeholder for the value of a flag of this type: `FLOAT`, `{a,b}`, `TEXT ...`; empty for a switch."""
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


Config = TypeVar("Config", bound="DataclassInstance")

HELP_FLAGS = {"-h": False, "--help": False, "--help-all": True, "--help_all": True}
"""Whether each shows all flags if the command has a first page."""
CONFIG_FLAG = "config"
# Short names of flags that most runs set.
SHORT_FLAGS = {"reward": "reward.remote_url"}
"""Each with the flag that it replaces."""
CONFIG_HELP = "Command-line flags override `--config FILE.yaml`."


def parse(
    config_class: type[Config],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    first_help: FirstHelp | None = None,
) -> Config:
    """Return `config_class` filled from its defaults, then each `--config FILE` in turn, then the other flags.

    Flags are the dotted names of the fields, with underscores or hyphens: `--actor.adam.lr 1e-6`. A bad flag, key or
    value ends the process with code 2; an unknown name is answered with the nearest known one.

    Args:
        argv: the arguments after the command's name; None reads `sys.argv`.
        first_help: what `--help` shows, if only `--help-all` shows all flags; None shows all flags at once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    lister = f"{prog} --help" if first_help is None else f"{prog} --help-all"
    try:
        settings = read_arguments(config_class, arguments, lister=lister)
    except YamlError as error:
        _exit(prog, str(error))
    required = {
        field.name: _REQUIRED
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    config = dotted.replace(config_class(**required), settings)
    asked = [HELP_FLAGS[argument] for argument in arguments if argument in HELP_FLAGS]
    if asked:
        first = None if any(asked) else first_help
        print(help_page(config, first, prog=prog, description=f"{description} {CONFIG_HELP}"))
        raise SystemExit(0)
    placed = positionals(config_class)
    if missing := [name for name in required if name not in settings]:
        told = (
            f"{placed.get(name) or f'--{name}'} is missing ({help_of(config_class, name).rstrip('.')})"
            for name in missing
        )
        _exit(prog, f"{'; '.join(told)}; {lister} lists all flags")
    return config


def read_arguments(config_class: type[DataclassInstance], argv: Sequence[str], *, lister: str) -> dict[str, object]:
    """Return by flag what a command line sets, by itself or in `--config` files; raises YamlError with a sentence.

    Args:
        lister: the command that lists all flags.
    """
    flags = dotted.leaf_types(config_class)
    accepted = only_defaults(flags)
    kinds = flags | {name: known.kind for name, known in accepted.items()}
    placed = positionals(config_class)
    from_files: dict[str, object] = {}
    given: dict[str, object] = {}
    stray: list[str] = []
    remaining = deque(argv)
    while remaining:
        argument = remaining.popleft()
        if argument in HELP_FLAGS:
            continue
        if not argument.startswith("--"):
            stray.append(argument)
            continue
        spelled, equals, text = argument.partition("=")
        name = _name(spelled[2:].replace("-", "_"), kinds, spelled=spelled, lister=lister)
        off = name not in kinds and name != CONFIG_FLAG
        flag = _turned_off(name) if off else name
        hint = kinds.get(flag, str)
        texts = [text] if equals else ["False"] if off else _values(hint, remaining)
        if flag == CONFIG_FLAG:
            if not texts or not texts[0]:
                raise YamlError("--config needs a file: --config stage.yaml")
            from_files |= read_settings(Path(texts[0]), flags)
            continue
        given[flag] = _read(texts, hint, spelled=spelled)
        if flag in accepted and given[flag] != accepted[flag].value:
            raise YamlError(accepted[flag].refusal(" ".join([spelled, *texts * (not off)])))
    for name, shown in placed.items():
        if typing.get_origin(flags[name]) is tuple and stray:
            given[name], stray = _read(stray, flags[name], spelled=shown), []
        elif stray:
            given[name] = _read([stray.pop(0)], flags[name], spelled=shown)
    if stray:
        raise YamlError(f"unexpected argument {' '.join(stray)}; {lister} lists all flags")
    return {name: value for name, value in (from_files | given).items() if name not in accepted}


def _values(hint: object, remaining: deque[str]) -> list[str]:
    """Take the texts of a flag's value off the arguments."""
    if dotted.is_switch(hint):
        return [remaining.popleft() if remaining and remaining[0] in ("True", "False", "None") else "True"]
    members = [member for member in (hint, *typing.get_args(hint)) if typing.get_origin(member) is tuple]
    parameters = typing.get_args(members[0]) if members else (str,)
    most = len(remaining) if parameters[-1] is Ellipsis else len(parameters)
    texts: list[str] = []
    while len(texts) < most and remaining and not remaining[0].startswith("--") and texts != ["None"]:
        texts.append(remaining.popleft())
    return texts


def _read(texts: list[str], hint: object, *, spelled: str) -> object:
    try:
        return read_texts(texts, hint)
    except ValueError as error:
        raise YamlError(f"{spelled} {error}") from None


def _exit(prog: str, sentence: str) -> NoReturn:
    print(f"{prog}: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _turned_off(name: str) -> str:
    """Return `ds.packing_samples` for `ds.no_packing_samples`, and another name as it is."""
    group, dot, last = name.rpartition(".")
    return f"{group}{dot}{last.removeprefix('no_')}"


def _name(name: str, kinds: Mapping[str, object], *, spelled: str, lister: str) -> str:
    """Return the full name of a flag, with `no_` if it is turned off; raises YamlError for a flag that there is not."""
    short = {one: full for one, full in SHORT_FLAGS.items() if full in kinds}
    if name in short:
        return short[name]
    if name in kinds or name == CONFIG_FLAG or dotted.is_switch(kinds.get(_turned_off(name))):
        return name
    # Imported only if needed: a large table.
    from lmm_r1.tools.migrate.other_names import counterpart

    known = [*kinds, *short]
    if here := counterpart(name, known=known):
        raise YamlError(f"{spelled} {here}")
    match = nearest(name, known=known)
    raise YamlError(f"unknown flag {spelled}; {f'did you mean --{match}?' if match else f'{lister} lists them all'}")


def refuse_other_names(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """End the process with code 2 at a flag that has another name here."""
    known = {action.dest for action in parser._actions}
    for argument in sys.argv[1:] if argv is None else argv:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and (name := flag[2:].replace("-", "_")) not in known:
            from lmm_r1.tools.migrate.other_names import renamed

            if here := renamed(name, known=known):
                _exit(parser.prog, f"{flag} {here}")
