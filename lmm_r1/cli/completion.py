"""`lmm-r1 completion bash`: a script with which a shell completes commands, flags and their choices."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lmm_r1 import dotted
from lmm_r1.cli import COMMANDS, run_command
from lmm_r1.cli.arguments import SHORT_FLAGS, parse, positionals, value_name
from lmm_r1.config.declared import Positional

PROG = "lmm-r1 completion"
DESCRIPTION = (
    "Print a shell script that completes commands, flags and their choices. "
    "The script does not call Python: print it again after an update."
)
SCRIPTS = {
    "bash": """\
_lmm_r1() {
  local known='' command=${COMP_WORDS[1]} before=${COMP_WORDS[COMP_CWORD - 1]}
  ((COMP_CWORD > 1)) || command=''
  case "$command $before" in
CASES
  esac
  COMPREPLY=($(compgen -W "$known" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _lmm_r1 lmm-r1""",
    "zsh": """\
#compdef lmm-r1
local known='' command=$words[2] before=$words[CURRENT-1]
((CURRENT > 2)) || command=''
case "$command $before" in
CASES
esac
compadd -- ${=known} || _files""",
}


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    shell: Positional[Literal["bash", "zsh"]]
    """The shell that the script is for."""


CONFIG = CompletionConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Print the script."""
    config = parse(CompletionConfig, argv, prog=PROG, description=DESCRIPTION)
    print(SCRIPTS[config.shell].replace("CASES", "\n".join(cases())))


def cases() -> Iterator[str]:
    """Yield the cases of a script: the words that may follow a command and the word before the cursor."""
    yield f"    ' '*) known='{' '.join((*COMMANDS, 'help'))}' ;;"
    for command in COMMANDS:
        flags = flags_of(command)
        for flag, choices in flags.items():
            if choices:
                yield f"    '{command} {flag}') known='{' '.join(choices)}' ;;"
        yield f"    '{command} '*) known='{' '.join(flags)}' ;;"


def flags_of(command: str) -> dict[str, Sequence[str]]:
    """Return by flag of a command what its value is one of; empty for other values."""
    module = importlib.import_module(f"lmm_r1.cli.{command}")
    if "CONFIG" not in vars(module):
        # The commands that serve have a parser of their own, and serve_verifier has one for each verifier.
        actions = module.build_parser()._actions if "build_parser" in vars(module) else ()
        return {flag: tuple(map(str, one.choices or ())) for one in actions for flag in one.option_strings}
    hints, placed = dotted.leaf_types(module.CONFIG), positionals(module.CONFIG)
    names = {f"--{name}": value_name(hint) for name, hint in hints.items() if name not in placed}
    names |= {f"--{short}": "" for short, full in SHORT_FLAGS.items() if full in hints}
    flags: dict[str, Sequence[str]] = {
        flag: name.strip("{}").split(",") if name[:1] == "{" else () for flag, name in names.items()
    }
    return flags | {"--config": (), "--help": ()}


if __name__ == "__main__":
    run_command(main)
