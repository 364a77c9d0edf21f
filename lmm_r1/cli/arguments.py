"""Command-line flags and YAML files read into the frozen dataclass of a command, and its help."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import json
import re
import shutil
import sys
import textwrap
import types
import typing
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import yaml

from lmm_r1 import dotted
from lmm_r1.config.declared import ArgumentPlace, JsonText
from lmm_r1.config.differences import only_defaults
from lmm_r1.dotted import nearest
from lmm_r1.files.user_code import UserFunction, function_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from lmm_r1.config.shared import FirstHelp

SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULL = ("", "~", "null", "none")


class YamlError(ValueError):
    """A settings file cannot be used; the message is one sentence naming the file and the line."""


def read_settings(path: Path, flags: Mapping[str, object]) -> dict[str, object]:
    """Return the settings in a YAML file under their dotted names; keys may be nested, dotted or both.

    Values are read from their text as the flag's type asks, so `1e-6` is a number and `off` a choice, which YAML's
    own rules would turn into a string and a boolean.

    Args:
        flags: the type of every known flag under its dotted name.

    Raises:
        YamlError: the file is missing or no YAML, a key is unknown or given twice, or a value has the wrong type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise YamlError(f"--config {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise YamlError(f"--config {path}: not a UTF-8 text file") from None
    return parse_settings(text, flags, source=str(path))


def parse_settings(text: str, flags: Mapping[str, object], *, source: str | None) -> dict[str, object]:
    """Return the settings in a YAML text, as `read_settings` does.

    Args:
        source: what the text is, in front of the line in messages; None is a text that nobody has written, without lines.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(f"{_place(source, line)}not valid YAML: {error.problem}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise YamlError(f"{_at(root, source)}expected settings such as `train.seed: 1`")
    settings: dict[str, object] = {}
    accepted = only_defaults(flags)
    kinds = {**flags, **{name: known.kind for name, known in accepted.items()}}
    for name, node in _leaves(root, kinds, prefix="", source=source):
        where = _at(node, source)
        if name in settings:
            raise YamlError(f"{where}{name} is given twice")
        try:
            settings[name] = _convert(node, kinds[name])
        except ValueError as error:
            raise YamlError(f"{where}{name} {error}") from None
        if name in accepted and settings[name] != accepted[name].value:
            raise YamlError(f"{where}{accepted[name].refusal(f'{name} {settings[name]}')}")
    return {name: value for name, value in settings.items() if name not in accepted}


def _at(node: yaml.Node, source: str | None) -> str:
    return _place(source, node.start_mark.line + 1)


def _place(source: str | None, line: int) -> str:
    return "" if source is None else f"{source}:{line}: "


def _leaves(
    mapping: yaml.MappingNode, flags: Mapping[str, object], *, prefix: str, source: str | None
) -> Iterator[tuple[str, yaml.Node]]:
    for key, value in mapping.value:
        where = _at(key, source)
        if not isinstance(key, yaml.ScalarNode):
            raise YamlError(f"{where}a key must be a name")
        name = prefix + key.value.replace("-", "_")
        if name in flags:
            yield name, value
        elif any(flag.startswith(f"{name}.") for flag in flags):
            if not isinstance(value, yaml.MappingNode):
                raise YamlError(f"{where}{name} is a group of settings, not a setting")
            yield from _leaves(value, flags, prefix=f"{name}.", source=source)
        else:
            advice = _advice(name, flags)
            if advice or not value.value or not isinstance(value, yaml.MappingNode):
                raise YamlError(f"{where}{advice or f'unknown key {name}'}")
            # The names inside say what is meant.
            yield from _leaves(value, flags, prefix=f"{name}.", source=source)


def _advice(name: str, flags: Mapping[str, object]) -> str:
    # Imported only if needed: a large table.
    from lmm_r1.tools.migrate import counterpart

    if here := counterpart(name, known=flags):
        return f"{name} {here.replace('--', '')}"
    match = nearest(name, known=flags)
    return f"unknown key {name}; did you mean {match}?" if match else ""


def read_texts(texts: Sequence[str], hint: object) -> object:
    """Return the value of a flag from its words on a command line; a ValueError says what was expected."""
    tag = "tag:yaml.org,2002:str"
    # Only None is open: other words stay as they are.
    nodes: list[yaml.Node] = [yaml.ScalarNode(tag, text, style='"') for text in texts]
    if texts == ["None"]:
        nodes = [yaml.ScalarNode(tag, "null")]
    elif tuple in (typing.get_origin(member) for member in (hint, *typing.get_args(hint))):
        nodes = [yaml.SequenceNode(tag, nodes)]
    if not nodes:
        raise ValueError(f"needs a value: {_describe(hint)}")
    return _convert(nodes[0], hint)


def _convert(node: yaml.Node, hint: object) -> object:
    """Return the node's value as `hint` asks; a ValueError says what was expected."""
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _convert(node, parameters[0])
    if origin in (typing.Union, types.UnionType):
        members = [member for member in parameters if member is not type(None)]
        if UserFunction in members:
            # Either a choice or a function of a file: only one of them, by the text's form.
            is_file = isinstance(node.value, str) and function_file(node.value) is not None
            members = [member for member in members if (member is UserFunction) == is_file]
        choices = [choice for member in members for choice in typing.get_args(member)]
        # Only what is not quoted may be null.
        is_null = isinstance(node, yaml.ScalarNode) and node.style is None and node.value.lower() in NULL
        if type(None) in parameters and is_null and node.value not in choices:
            return None
        return _first_that_fits(node, members)
    if origin is tuple:
        return _convert_tuple(node, parameters)
    if hint is JsonText and isinstance(node, yaml.MappingNode):
        return json.dumps(_as_json(node), ensure_ascii=False)
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"must be {_describe(hint)}, not a list or a group")
    return _convert_text(node.value, hint)


def _first_that_fits(node: yaml.Node, members: list[object]) -> object:
    for member in members[:-1]:
        try:
            return _convert(node, member)
        except ValueError:
            continue
    return _convert(node, members[-1])


def _convert_tuple(node: yaml.Node, parameters: tuple[object, ...]) -> tuple[object, ...]:
    if not isinstance(node, yaml.SequenceNode):
        raise ValueError("must be a list such as [0.9, 0.95]")
    if parameters[-1] is Ellipsis:
        return tuple(_convert(item, parameters[0]) for item in node.value)
    if len(node.value) != len(parameters):
        raise ValueError(f"must have {len(parameters)} values, not {len(node.value)}")
    return tuple(_convert(item, hint) for item, hint in zip(node.value, parameters, strict=True))


def _as_json(node: yaml.Node) -> object:
    """Return a node as JSON has it: what is not quoted and reads as a number, true, false or null in JSON is one."""
    if isinstance(node, yaml.MappingNode):
        found = {_as_key(key): _as_json(value) for key, value in node.value}
        if len(found) < len(node.value):
            raise ValueError("names a key twice")
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_as_json(item) for item in node.value]
    assert isinstance(node, yaml.ScalarNode), "mappings and sequences are handled above"
    if node.style is not None:
        return node.value
    try:
        return json.loads(node.value)
    except json.JSONDecodeError:
        return node.value


def _as_key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("must have names as keys")
    return str(node.value)


def _convert_text(text: str, hint: object) -> object:
    if typing.get_origin(hint) is typing.Literal:
        for choice in typing.get_args(hint):
            if str(choice) == text:
                return choice
    elif hint is bool:
        if text.lower() in SWITCH:
            return SWITCH[text.lower()]
    elif hint is float and text.lower().lstrip("+-") == ".inf":
        return float(text.replace(".", ""))
    else:
        try:
            return typing.cast(type, hint)(text)
        except (TypeError, ValueError):
            pass
    raise ValueError(f"must be {_describe(hint)}, not {text!r}{_meant(text, hint)}")


def _meant(text: str, hint: object) -> str:
    """Return the end of a sentence that suggests a choice for an unknown value; "" without a suggestion."""
    if typing.get_origin(hint) is not typing.Literal:
        return ""
    from lmm_r1.tools.migrate.table import names_of

    choices = [str(choice) for choice in typing.get_args(hint)]
    here = names_of("estimators").get(text.lower().replace("++", "_plus_plus").replace("-", "_").replace("@", ""))
    if here in choices:
        return f", which is called {here} here"
    match = nearest(text, known=choices)
    return f"; did you mean {match}?" if match else ""


def _describe(hint: object) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    names: dict[object, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        JsonText: "JSON",
    }
    return names.get(hint, str(hint))


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
    typed = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    said = "required" if default is _REQUIRED else f"default: {typed or 'none'}"
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
    from lmm_r1.tools.migrate import counterpart

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
            from lmm_r1.tools.migrate import renamed

            if here := renamed(name, known=known):
                _exit(parser.prog, f"{flag} {here}")
