"""No flag that lies: each has an effect that a named test sees, or is refused by name; docs/flags.md shows which."""

import ast
import re
from collections.abc import Container
from functools import cache

import pytest
from helpers.flag_table import BEGIN, COMMANDS, END, PAGE, ROOT, effects_of, page
from helpers.tables import FOLDER

from lmm_r1 import dotted
from lmm_r1.config import NOT_YET
from lmm_r1.config.checks import refuse_unavailable
from lmm_r1.errors import UserError

pytestmark = pytest.mark.contract

# What a flag that takes anything may be given.
PROBES = (True, 0, 2, 3, 0.5, "gloo")


@cache
def functions_of(path: str) -> dict[str, str]:
    """The tests of a file by name, each with all of the file's text and of its tables."""
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")
    names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for module in re.findall(r'(?:table|frozen)\("([^"]+)"', text):
        text += (FOLDER / f"{module}.yaml").read_text(encoding="utf-8")
    return dict.fromkeys(names, text)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_row_and_every_row_a_flag(command):
    assert set(dotted.leaf_types(COMMANDS[command])) == set(effects_of(command))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_test_is_there_and_its_file_speaks_of_the_flag(command):
    for flag, tests in effects_of(command).items():
        spoken = ""
        for test in tests:
            path, _, name = test.partition("::")
            functions = functions_of(path)
            assert f"test_{name}" in functions, f"{flag}: {test}"
            spoken += functions[f"test_{name}"]
        assert flag.rpartition(".")[2] in spoken, f"{flag}: no file of its tests names it"


def refused_values(refused: Container[object]) -> list[object]:
    # A range looks for what is no whole number among all that it holds.
    probes = [value for value in PROBES if type(value) is int] if isinstance(refused, range) else PROBES
    return [value for value in probes if value in refused]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_available_is_refused_in_every_command_that_has_the_flag(command):
    known = dotted.leaf_types(COMMANDS[command])
    for flag, refused in NOT_YET.items():
        if flag not in known:
            continue
        values = refused_values(refused)
        assert values, f"{flag}: a probe of its kind is missing above"
        for value in values:
            with pytest.raises(UserError, match=f"^--{flag}.* is not available in this version; "):
                refuse_unavailable(dotted.replace(COMMANDS[command](), {flag: value}))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_default_is_never_refused(command):
    refuse_unavailable(COMMANDS[command]())


def test_the_docs_show_the_table():
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    # Line by line: of two long texts the difference takes minutes to be shown.
    wrong = sorted(set(shown.splitlines()) ^ set(page().splitlines()))
    assert wrong[:3] == [], "run `PYTHONPATH=. python tests/helpers/flag_table.py`"
    empty = [line for line in shown.splitlines() if line.startswith("| `--") and line.count(" | ") != 3]
    assert empty == []
