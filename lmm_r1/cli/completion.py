"""`lmm-r1 completion bash`: a script with which a shell completes commands, flags and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from lmm_r1.cli import run_command
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.known_flags import Known, known_commands

PROG = "lmm-r1 completion"
DESCRIPTION = (
    "Print a script for the shell, which completes commands, flags and the values of those that take one of a few. "
    "It asks nothing of Python, so print it again after an update."
)
# What the scripts take for a value that is a file, or any text.
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
