"""Every flag of the installed OpenRLHF exists here with the same default, and its command lines work unchanged.

OpenRLHF's parser and checks stand under `__main__` in modules that import ray and vllm. They are taken out of the source
and run alone, so that the installed version itself says what its flags are and what its checks make of them.
"""

import argparse
import ast
import importlib.util
import os
import re
import runpy
import sys
import types
import typing
from datetime import datetime
from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.config import (
    DIFFERENCES,
    DPOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    resolve,
    sized_ppo,
    sized_supervised,
)
from lmm_r1.config.declared import has_effect
from lmm_r1.config.differences import only_defaults
from lmm_r1.config.ppo import GPU_COUNTS
from lmm_r1.host.strategy import to_openrlhf_args

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))


pytestmark = pytest.mark.skipif(importlib.util.find_spec("openrlhf") is None, reason="OpenRLHF is not installed")

COMMANDS = {"train_ppo_ray": PPOConfig, "train_sft": SFTConfig, "train_dpo": DPOConfig, "train_rm": RMConfig}
COMMAND_LINES = table("contracts/openrlhf_flags", "command_lines")
CASES = [(command, line.split()) for command, lines in COMMAND_LINES.items() for line in lines]


def openrlhf_file(name: str) -> Path:
    spec = importlib.util.find_spec("openrlhf")
    return Path(spec.submodule_search_locations[0]) / name


def main_block(command: str) -> list[ast.stmt]:
    """The statements under `if __name__ == "__main__":`, less imports of OpenRLHF and the call that trains."""
    tree = ast.parse(openrlhf_file(f"cli/{command}.py").read_text(encoding="utf-8"))
    (block,) = (node.body for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
    kept = [node for node in block if not isinstance(node, ast.ImportFrom) and ast.unparse(node) != "train(args)"]
    assert len(kept) < len(block)
    return kept


def execute(statements: list[ast.stmt], command: str) -> dict[str, typing.Any]:
    hierarchize = runpy.run_path(str(openrlhf_file("utils/config.py")))["hierarchize"]
    names = {"argparse": argparse, "datetime": datetime, "os": os, "hierarchize": hierarchize}
    exec(compile(ast.Module(statements, type_ignores=[]), f"<openrlhf {command}>", "exec"), names)
    return names


def their_flags(command: str) -> dict[str, argparse.Action]:
    """OpenRLHF's flags by destination; `--x.no_y` shares the destination of `--x.y`."""
    before_parsing = []
    for node in main_block(command):
        if "parse_args" in ast.unparse(node):
            break
        before_parsing.append(node)
    parser = execute(before_parsing, command)["parser"]
    actions = [action for action in parser._actions if action.dest != "help"]
    assert len(actions) > 70
    return {action.dest: action for action in reversed(actions)}


def their_args(command: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """What OpenRLHF's own parser and checks make of a command line."""
    monkeypatch.setattr(sys, "argv", [command, *argv])
    return execute(main_block(command), command)["args"]


def comparable(value: object) -> object:
    """Lists as tuples, and the time in a run's default name left out."""
    if isinstance(value, list):
        return tuple(value)
    return re.sub(r"_\d{4}T\d\d:\d\d$", "_TIME", value) if isinstance(value, str) else value


def different(command: str) -> dict[str, object]:
    return {difference.flag: difference.theirs for difference in DIFFERENCES if difference.command == command}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_here_with_the_same_default(command):
    args = to_openrlhf_args(COMMANDS[command]())
    wrong = {
        flag: (dotted.get(args, flag), action.default)
        for flag, action in their_flags(command).items()
        if flag not in different(command) and comparable(dotted.get(args, flag)) != comparable(action.default)
    }
    assert wrong == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_takes_what_openrlhfs_takes(command):
    types_here = dotted.leaf_types(COMMANDS[command])
    accepted = only_defaults(types_here)
    for flag, action in their_flags(command).items():
        if flag in accepted and flag not in types_here:
            assert accepted[flag].value == action.default, flag
            continue
        hint = types_here[flag]
        if action.nargs == 0:
            assert dotted.is_switch(hint), flag
        elif action.choices:
            literal = hint if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)[0]
            assert set(action.choices) <= set(typing.get_args(literal)), flag
        elif action.nargs == 2:
            assert "tuple[float, float]" in str(hint), flag
        elif action.nargs in ("+", "*"):
            assert typing.get_args(hint) == (action.type, Ellipsis), flag
        else:
            kinds = {type(kind) if isinstance(kind, str) else kind for kind in (hint, *typing.get_args(hint))}
            assert action.type in kinds, flag


@pytest.mark.parametrize(("command", "argv"), CASES)
def test_a_command_line_of_openrlhf_means_the_same_here(command, argv, monkeypatch):
    theirs = their_args(command, argv, monkeypatch)
    config = resolve(parse(COMMANDS[command], argv, prog=command, description=""))
    # Sizes that no flag names are OpenRLHF's where there are rows enough for them.
    if isinstance(config, PPOConfig):
        config, _ = sized_ppo(config, rows=100_000)
    else:
        config, _ = sized_supervised(config, rows=100_000, processes=8)
    ours = to_openrlhf_args(config)
    wrong = {
        flag: (dotted.get(ours, flag), dotted.get(theirs, flag))
        for flag in their_flags(command)
        # Those that the line does not name are what this machine has.
        if (flag not in GPU_COUNTS or f"--{flag}" in argv)
        # Such as the rate of a critic that there is not.
        and (flag not in dotted.leaf_types(COMMANDS[command]) or has_effect(flag, config))
        and comparable(dotted.get(ours, flag)) != comparable(dotted.get(theirs, flag))
    }
    assert wrong == {}
