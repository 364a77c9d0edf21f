"""`lmm-r1 completion bash`: a script with which a shell completes commands, flags and their values."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmm_r1 import dotted
from lmm_r1.cli import COMMANDS, run_command
from lmm_r1.cli.arguments import CONFIG_FLAG, SHORT_FLAGS, parse, positionals
from lmm_r1.config.declared import Positional

SHELLS = ("bash", "zsh")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What may follow a command's name."""

    flags: Mapping[str, Sequence[str] | None]
    """By flag, with its dashes: the words that its value is one of, none for a switch; None is a file, or any text."""
    words: Sequence[str] = ()
    """Possible first arguments, such as the command that is planned."""


def known_commands() -> dict[str, Known]:
    """Return what is known of each command, `plan train_sft` and `serve_verifier math` among them."""
    from lmm_r1.cli.plan import PLANNED, planned_by
    from lmm_r1.tasks import TASKS
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
    placed = positionals(config_class)
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
    from remote_rm.registry import build_parser

    return _of_parser(build_parser(name, prog=name))


def _of_parser(parser: argparse.ArgumentParser) -> Known:
    flags: dict[str, Sequence[str] | None] = {}
    for action in parser._actions:
        words: Sequence[str] | None = () if action.nargs == 0 else None
        if action.choices is not None:
            words = tuple(map(str, action.choices))
        flags |= {flag: words for flag in action.option_strings if flag.startswith("--")}
    return Known(flags=flags)


PROG = "lmm-r1 completion"
DESCRIPTION = (
    "Print a shell script that completes commands, flags and their values. "
    "The script does not call Python: print it again after an update."
)
# The scripts' mark for a value that is a file or any text.
_FILES = "@files"


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    shell: Positional[Literal["bash", "zsh"]]
    """The shell that the script is for."""


CONFIG = CompletionConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Print the script."""
    config = parse(CompletionConfig, argv, prog=PROG, description=DESCRIPTION)
    front = Path(__file__).with_name(f"completion.{config.shell}").read_text(encoding="utf-8")
    print(front.replace("# TABLE\n", table(known_commands())), end="")


def table(commands: Mapping[str, Known]) -> str:
    """Return the function of both shells that sets `named`, `flags` and `values` by a command and the flag before the cursor."""
    cases = "\n".join(f'    "{name}")\n{_case(known)}\n      ;;' for name, known in commands.items())
    return (
        "_lmm_r1_known() {\n  named='' flags='' values=''\n"
        f'  case "$1" in\n{cases}\n    *) return 1 ;;\n  esac\n}}\n'
    )


def _case(known: Known) -> str:
    flags_by_values: dict[str, list[str]] = {}
    for flag, words in known.flags.items():
        if words != ():
            flags_by_values.setdefault(_FILES if words is None else " ".join(words), []).append(flag)
    lines = [f"      named='{' '.join(known.words)}'", f"      flags='{' '.join(known.flags)}'"]
    if flags_by_values:
        lines.append('      case "$2" in')
        lines += [f"        {'|'.join(flags)}) values='{values}' ;;" for values, flags in flags_by_values.items()]
        lines.append("      esac")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
