"""Every command's flags and the values that they take, as a shell completes them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tyro.conf import Positional

from lmm_r1 import dotted
from lmm_r1.cli import COMMANDS
from lmm_r1.cli.arguments import CONFIG_FLAG, SHORT_FLAGS

SHELLS = ("bash", "zsh")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What may stand behind a command's name."""

    flags: Mapping[str, Sequence[str] | None]
    """By flag, with its dashes: the words that its value is one of, none for a switch; None is a file, or any text."""
    words: Sequence[str] = ()
    """What the first argument may be, such as the command that is planned."""


def known_commands() -> dict[str, Known]:
    """Return what is known of each command, `plan train_sft` and `serve_verifier math` among them."""
    from lmm_r1.cli.plan import PLANNED, planned_by
    from lmm_r1.tasks.task import TASKS
    from remote_rm.registry import VERIFIERS

    known = {name: _of_module(name) for name in COMMANDS}
    known["plan"] = dataclasses.replace(known["plan"], words=tuple(PLANNED))
    known["make_task"] = dataclasses.replace(known["make_task"], words=tuple(TASKS))
    known["completion"] = dataclasses.replace(known["completion"], words=SHELLS)
    known["serve_verifier"] = Known(flags={}, words=tuple(VERIFIERS))
    known |= {f"plan {name}": _of_config(planned_by(name)) for name in PLANNED}
    known |= {f"serve_verifier {name}": _of_verifier(name) for name in VERIFIERS}
    known["help"] = Known(flags={}, words=tuple(COMMANDS))
    known[""] = Known(flags={"--help": (), "--version": ()}, words=(*COMMANDS, "help"))
    return known


def _of_module(name: str) -> Known:
    module = importlib.import_module(f"lmm_r1.cli.{name}")
    if "CONFIG" in vars(module):
        return _of_config(module.CONFIG)
    # The commands that serve have a parser of their own; serve_verifier has one for each verifier.
    return _of_parser(module.build_parser()) if "build_parser" in vars(module) else Known(flags={})


def _of_config(config_class: type) -> Known:
    hints = typing.get_type_hints(config_class, include_extras=True)
    placed = {name for name, hint in hints.items() if Positional in typing.get_args(hint)}
    flags: dict[str, Sequence[str] | None] = {}
    for name, hint in dotted.leaf_types(config_class).items():
        if name in placed:
            continue
        flags[f"--{name}"] = _words(hint)
        if dotted.is_switch(hint):
            group, dot, last = name.rpartition(".")
            flags[f"--{group}{dot}no_{last}"] = ()
    short = {f"--{short}": flags[f"--{full}"] for short, full in SHORT_FLAGS.items() if f"--{full}" in flags}
    return Known(flags={**flags, **short, f"--{CONFIG_FLAG}": None, "--help": (), "--help-all": ()})


def _words(hint: object) -> Sequence[str] | None:
    if dotted.is_switch(hint):
        return ()
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _words(next(member for member in parameters if member is not type(None)))
    if origin is tuple:
        return _words(parameters[0])
    if origin is typing.Literal:
        return tuple(map(str, parameters))
    return None


def _of_verifier(name: str) -> Known:
    from remote_rm import verifier_command

    return _of_parser(verifier_command.build_parser(name, prog=name))


def _of_parser(parser: argparse.ArgumentParser) -> Known:
    flags: dict[str, Sequence[str] | None] = {}
    for action in parser._actions:
        words: Sequence[str] | None = () if action.nargs == 0 else None
        if action.choices is not None:
            words = tuple(map(str, action.choices))
        flags |= {flag: words for flag in action.option_strings if flag.startswith("--")}
    return Known(flags=flags)
