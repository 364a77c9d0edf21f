"""Command-line flags and YAML files read into the frozen dataclass of a command, and its help."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import tyro

from lmm_r1 import dotted
from lmm_r1.cli.yaml_file import YamlError, read_settings, refused_value
from lmm_r1.config.differences import only_defaults
from lmm_r1.config.shared import JsonText
from lmm_r1.data.media_access import MEGAPIXELS, MediaLimits
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from remote_rm.registry import positive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from lmm_r1.config.shared import Example, FirstHelp
    from lmm_r1.data.sent_prompt import MediaAccess


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
    parts += ["Examples:", *(_shown(example, prog=prog, width=width) for example in first.examples)]
    parts.append(f"The {len(first.flags)} most used flags:")
    parts += [_told(defaults, flag, flags[flag], width=width) for flag in first.flags]
    parts.append(f"`{prog} --help-all` lists all {len(flags)} flags.")
    return "\n\n".join(parts)


def positionals(config_class: type) -> dict[str, str]:
    """Return what stands in the usage for each argument that has no flag."""
    found = {}
    for name, hint in typing.get_type_hints(config_class, include_extras=True).items():
        marks = typing.get_args(hint)
        if tyro.conf.Positional in marks:
            choices = value_name(marks[0]) if typing.get_origin(marks[0]) is typing.Literal else name.upper()
            found[name] = next((mark.metavar for mark in marks if hasattr(mark, "metavar")), choices)
    return found


def _shown(example: Example, *, prog: str, width: int) -> str:
    """Return an example with its flags and their values in lines that a shell reads as one."""
    lines = [f"  {prog}"]
    for flag in re.split(" (?=--)", example.arguments):
        # Two characters for the backslash at the end of the line.
        if len(lines[-1]) + 1 + len(flag) > width - 2:
            lines.append(f"      {flag}")
        else:
            lines[-1] += f" {flag}"
    return f"  # {example.what}\n" + " \\\n".join(lines)


def _told(defaults: object, flag: str, hint: object, *, width: int, place: str | None = None) -> str:
    default = dotted.get(defaults, flag)
    said = "required" if default is tyro.MISSING else f"default: {_as_typed(default)}"
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
_SWITCH_VALUES = ("True", "False", "None")
_WIDTH = "COLUMNS"
# What tyro says of one: `--data FILE [FILE ...] The rows.`, or without the flag.
_ARGUMENT = re.compile(r"(?P<flag>--\S+ )?(?P<kind>\S+)(?: \[\S+ \.\.\.\])? ?(?P<what>.*)")
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
    arguments, config_files = _split_config_files(list(sys.argv[1:] if argv is None else argv), prog=prog)
    flags = dotted.leaf_types(config_class)
    arguments = [_in_full(argument, flags) for argument in arguments]
    arguments = _without_only_defaults(arguments, flags, prog=prog)
    lister = f"{prog} --help" if first_help is None else f"{prog} --help-all"
    _refuse_unknown_flags(arguments, flags, prog=prog, lister=lister)
    _refuse_wrong_values(arguments, flags, prog=prog)
    arguments = list(_open_switches_valued(arguments, flags))
    default = tyro.MISSING_NONPROP
    if config_files:
        try:
            settings = {key: value for file in config_files for key, value in read_settings(file, flags).items()}
        except YamlError as error:
            _exit(prog, str(error))
        default = dotted.replace(_defaults(config_class), settings)
    read = functools.partial(tyro.cli, config_class, prog=prog, args=arguments, default=default, use_underscores=True)
    asked = [HELP_FLAGS[argument] for argument in arguments if argument in HELP_FLAGS]
    if asked:
        given = default if isinstance(default, config_class) else _defaults(config_class)
        first = None if any(asked) else first_help
        print(help_page(given, first, prog=prog, description=f"{description} {CONFIG_HELP}"))
        raise SystemExit(0)
    return _in_a_sentence(read, prog=prog, lister=lister)


def given_flags(config_class: type[DataclassInstance], argv: Sequence[str] | None, *, prog: str) -> set[str]:
    """Return the names of the flags that a command line, which `parse` takes, sets by itself or in a `--config` file."""
    arguments, config_files = _split_config_files(list(sys.argv[1:] if argv is None else argv), prog=prog)
    flags = dotted.leaf_types(config_class)
    spelled = {_in_full(argument, flags).partition("=")[0] for argument in arguments if argument.startswith("--")}
    named = {flag[2:].replace("-", "_") for flag in spelled}
    return {*named, *map(_turned_off, named)} | {key for file in config_files for key in read_settings(file, flags)}


def _exit(prog: str, sentence: str) -> NoReturn:
    print(f"{prog}: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _split_config_files(arguments: list[str], *, prog: str) -> tuple[list[str], list[Path]]:
    """Take every `--config FILE` and `--config=FILE` out of the arguments."""
    rest: list[str] = []
    files: list[Path] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name != f"--{CONFIG_FLAG}":
            rest.append(argument)
            continue
        value = value if equals else next(remaining, "")
        if not value or value.startswith("--"):
            _exit(prog, "--config needs a file: --config stage.yaml")
        files.append(Path(value))
    return rest, files


def _in_full(argument: str, flags: dict[str, object]) -> str:
    """Return `--reward.remote_url=x` for `--reward=x`, and so on; what is no short form is left as it is."""
    spelled, equals, value = argument.partition("=")
    full = SHORT_FLAGS.get(spelled[2:]) if spelled.startswith("--") else None
    return f"--{full}{equals}{value}" if full in flags else argument


def _turned_off(name: str) -> str:
    """Return `ds.packing_samples` for `ds.no_packing_samples`, and another name as it is."""
    group, dot, last = name.rpartition(".")
    return f"{group}{dot}{last.removeprefix('no_')}"


def _open_switches_valued(arguments: Sequence[str], flags: dict[str, object]) -> Iterator[str]:
    """Yield the arguments with the value that tyro asks for after a switch that may be open: `--x True`, `--x False`."""
    switches = {name for name, hint in flags.items() if hint == bool | None}
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, equals, value = argument.partition("=")
        name = name[2:].replace("-", "_") if argument.startswith("--") else ""
        off = _turned_off(name)
        if name in switches and equals:
            yield f"--{name}={value.capitalize()}"
        elif name in switches:
            yield argument
            if following not in _SWITCH_VALUES:
                yield "True"
        elif off in switches:
            yield from (f"--{off}", "False")
        else:
            yield argument


def _without_only_defaults(arguments: Sequence[str], flags: dict[str, object], *, prog: str) -> list[str]:
    """Return the arguments without those of ONLY_DEFAULTS; another value than the default ends the process with code 2."""
    accepted = only_defaults(flags)
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        spelled, equals, text = argument.partition("=")
        name = spelled[2:].replace("-", "_") if spelled.startswith("--") else ""
        negated = name not in accepted and _turned_off(name) in accepted
        known = accepted.get(_turned_off(name) if negated else name)
        if known is None:
            rest.append(argument)
        elif isinstance(known.value, bool):
            value = not negated if not equals else text.lower() == "true"
            if value != known.value:
                _exit(prog, known.refusal(f"--{name}"))
        else:
            text = text if equals else next(remaining, "")
            if text != str(known.value):
                _exit(prog, known.refusal(f"--{name} {text}"))
    return rest


def _refuse_unknown_flags(arguments: Sequence[str], flags: dict[str, object], *, prog: str, lister: str) -> None:
    """End the process with code 2 at a flag that there is not.

    Args:
        lister: the command that lists all flags.
    """
    # tyro would find these too, but only after its box has listed every stray value as a flag of its own.
    switches = (name.rpartition(".") for name, hint in flags.items() if dotted.is_switch(hint))
    negated = {f"{group}{dot}no_{name}" for group, dot, name in switches}
    for argument in arguments:
        if not argument.startswith("--") or argument == "--" or argument in HELP_FLAGS:
            continue
        spelled = argument.partition("=")[0]
        name = spelled[2:].replace("-", "_")
        if name in flags or name in negated:
            continue
        # Imported only if needed: a large table.
        from lmm_r1.migrate.other_names import counterpart

        known = [*flags, *(short for short, full in SHORT_FLAGS.items() if full in flags)]
        if here := counterpart(name, known=known):
            _exit(prog, f"{spelled} {here}")
        match = nearest(name, known=known)
        hint = f"did you mean --{match}?" if match else f"{lister} lists them all"
        _exit(prog, f"unknown flag {spelled}; {hint}")


def _refuse_wrong_values(arguments: Sequence[str], flags: dict[str, object], *, prog: str) -> None:
    for place, argument in enumerate(arguments):
        spelled, equals, value = argument.partition("=")
        hint = flags.get(spelled[2:].replace("-", "_")) if spelled.startswith("--") else None
        following = itertools.takewhile(lambda one: not one.startswith("--"), arguments[place + 1 :])
        values = [value] if equals else list(following)
        if is_list := typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis:
            hint = typing.get_args(hint)[0]
        for value in values if is_list else values[:1]:
            if hint is not None and (refusal := refused_value(value, hint)):
                _exit(prog, f"{spelled} {refusal}")


def _in_a_sentence(read: Callable[[], Config], *, prog: str, lister: str) -> Config:
    """Return the result of `read`; print errors of tyro, which come in a box, as one line."""
    said = io.StringIO()
    width = os.environ.get(_WIDTH)
    # As wide as any sentence, so that none is broken.
    os.environ[_WIDTH] = "10000"
    try:
        with contextlib.redirect_stderr(said):
            return read()
    except SystemExit as end:
        inside = _inside_of_box(said.getvalue())
        if end.code in (0, None) or not inside:
            print(said.getvalue(), end="", file=sys.stderr)
            raise
        _exit(prog, f"{_missing(inside) or ' '.join(inside).rstrip('.')}; {lister} lists all flags")
    finally:
        os.environ.pop(_WIDTH)
        if width is not None:
            os.environ[_WIDTH] = width


def _inside_of_box(text: str) -> list[str]:
    """Return the lines of tyro's message below its title, without the help of flags that may follow."""
    # A terminal without box characters gets dashes and bars.
    lines = [line.strip(" │|╭╮╰╯") for line in text.splitlines()]
    rules = [place for place, line in enumerate(lines) if line.endswith(("─", "---"))]
    below = lines[rules[0] + 1 :] if rules else lines
    told = itertools.takewhile(lambda line: not line.startswith(("Argument helptext:", "For full helptext")), below)
    return [line for line in told if line and not line.endswith(("─", "---"))]


def _missing(inside: Sequence[str]) -> str:
    """Return the arguments that tyro reports as missing, with their help; "" for another message."""
    if not inside or not inside[0].startswith("Missing from "):
        return ""
    # Each is its flag, if it has one, the kind of its value, what it is, and a mark.
    told = (one.strip() for one in " ".join(inside[1:]).split("(required)"))
    parts = (_ARGUMENT.match(one) for one in told if one)
    return "; ".join(
        f"{(part['flag'] or part['kind']).strip()} is missing ({part['what'].rstrip('.') or part['kind']})"
        for part in parts
        if part
    )


def _defaults(config_class: type[Config]) -> Config:
    """Return the defaults; a field that has none holds tyro's mark for a flag that must be given."""
    required = (
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    return config_class(**dict.fromkeys(required, tyro.MISSING))


def refuse_other_names(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """End the process with code 2 at a flag that has another name here."""
    known = {action.dest for action in parser._actions}
    for argument in sys.argv[1:] if argv is None else argv:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and (name := flag[2:].replace("-", "_")) not in known:
            from lmm_r1.migrate.other_names import renamed

            if here := renamed(name, known=known):
                _exit(parser.prog, f"{flag} {here}")


def add_access_arguments(parser: argparse.ArgumentParser, *, named_by: str) -> None:
    """Add the flags of what the server may read and run.

    Args:
        named_by: what names images in the requests.
    """
    parser.add_argument(
        "--image-root",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help=f"folder below which images and videos that {named_by} name by their path are read; may be given several times",
    )
    parser.add_argument(
        "--allow-urls", action="store_true", help=f"fetch images that {named_by} name by an http(s) URL"
    )
    parser.add_argument(
        "--allow-private-urls",
        action="store_true",
        help="with --allow-urls: fetch from this machine and from private networks, too",
    )
    parser.add_argument(
        "--max-image-megapixels",
        type=positive(float),
        default=MEGAPIXELS,
        metavar="NUMBER",
        help="refuse images with more pixels, in millions, before they are decoded",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the checkpoint"
    )


def media_access(args: argparse.Namespace) -> MediaAccess:
    """Return the allowed sources of images and videos; raises UserError if a root is not a folder."""
    for root in args.image_root:
        if not root.is_dir():
            raise UserError(f"--image_root {root}: no such folder; check the path")
    from lmm_r1.data.sent_prompt import MediaAccess

    MediaLimits(max_megapixels=args.max_image_megapixels, allow_private_urls=args.allow_private_urls).apply()
    return MediaAccess(roots=tuple(args.image_root), allow_urls=args.allow_urls)
