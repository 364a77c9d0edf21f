"""No flag that lies: each has an effect that a named test sees, or is refused by name. docs/flags.md is as it is built."""

import ast
import sys
from collections.abc import Container
from functools import cache

import pytest
from helpers.flag_effects import CONFIGS, ROOT, effects_of

from lmm_r1 import dotted
from lmm_r1.config import NOT_YET
from lmm_r1.config.checks import refuse_unavailable
from lmm_r1.errors import UserError

sys.path.append(str(ROOT / "docs"))

from flags_page import FLAGS_PAGE, flags_page

pytestmark = pytest.mark.contract

# What a flag that takes anything may be given.
PROBES = (True, 0, 2, 3, 0.5, "gloo")


@cache
def functions_of(path: str) -> dict[str, str]:
    """The tests of a file by name, and all of its text."""
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")
    names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return dict.fromkeys(names, text)


@pytest.mark.parametrize("command", CONFIGS)
def test_every_flag_has_a_row_and_every_row_a_flag(command):
    assert set(dotted.leaf_types(CONFIGS[command])) == set(effects_of(command))


@pytest.mark.parametrize("command", CONFIGS)
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


@pytest.mark.parametrize("command", CONFIGS)
def test_what_is_not_available_is_refused_in_every_command_that_has_the_flag(command):
    known = dotted.leaf_types(CONFIGS[command])
    for flag, refused in NOT_YET.items():
        if flag not in known:
            continue
        values = refused_values(refused)
        assert values, f"{flag}: a probe of its kind is missing above"
        for value in values:
            with pytest.raises(UserError, match=f"^--{flag}.* is not available in this version; "):
                refuse_unavailable(dotted.replace(CONFIGS[command](), {flag: value}))


@pytest.mark.parametrize("command", CONFIGS)
def test_a_default_is_never_refused(command):
    refuse_unavailable(CONFIGS[command]())


def test_the_page_of_flags_is_as_it_is_built():
    shown = FLAGS_PAGE.read_text(encoding="utf-8")
    # Line by line: pytest takes minutes to show how two long texts differ.
    wrong = sorted(set(shown.splitlines()) ^ set(flags_page().splitlines()))
    assert wrong[:3] == [], "run `make docs`"
    assert (shown == flags_page()) is True, "run `make docs`"


@pytest.mark.parametrize("command", CONFIGS)
def test_the_page_has_every_flag_of_a_command_with_a_default_and_an_effect(command):
    rows = [line for line in flags_page().splitlines() if line.startswith("| `--")]
    assert all(len([cell for cell in row.strip("|").split(" | ") if cell.strip()]) >= 3 for row in rows)
    assert {f"--{flag}" for flag in dotted.leaf_types(CONFIGS[command])} <= {row.split("`")[1] for row in rows}
