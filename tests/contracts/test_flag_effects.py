"""No flag that lies: each has an effect that a named test sees, or is refused by name. docs/flags.md is as it is built."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from helpers.tables import FOLDER

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.config.differences import only_defaults

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))

from flags_page import CONFIGS, FLAGS_PAGE, flags_page  # noqa: E402

# The parts of flag_effects.yaml that apply to a command, besides its own.
PARTS = {
    "train_ppo_ray": ("all",),
    "train_sft": ("all", "supervised"),
    "train_kd": ("all", "supervised", "train_sft"),
    "train_dpo": ("all", "supervised", "pairs"),
    "train_kto": ("all", "supervised"),
    "train_prm": ("all", "supervised"),
    "train_rm": ("all", "supervised", "pairs"),
}
assert PARTS.keys() == CONFIGS.keys()


def effects_of(command: str) -> dict[str, list[str]]:
    """Return the tests of each flag of a command: `unit/rl/test_steps.py::a_name_without_test_`."""
    parts = yaml.safe_load((ROOT / "tests" / "data" / "flag_effects.yaml").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for part in (*PARTS[command], command):
        for test, flags in parts[part].items():
            for flag in flags:
                found.setdefault(flag, []).append(test)
    return found


sys.path.append(str(ROOT / "docs"))

pytestmark = pytest.mark.contract


@cache
def functions_of(path: str) -> dict[str, str]:
    """The tests of a file by name, each with all of the file's text and of its tables."""
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")
    names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for module in re.findall(r'(?:table|frozen)\("([^"]+)"', text):
        text += (FOLDER / f"{module}.yaml").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("command", CONFIGS)
def test_a_flag_of_openrlhf_with_one_value_is_accepted_with_it_and_refused_with_another(command, capsys, tmp_path):
    config_class = CONFIGS[command]
    accepted = only_defaults(dotted.leaf_types(config_class))
    assert len(accepted) == {"train_ppo_ray": 5, "train_rm": 5}.get(command, 4)
    file = tmp_path / "stage.yaml"
    file.write_text("".join(f"{flag}: {known.value}\n" for flag, known in accepted.items()))
    assert parse(config_class, ["--config", str(file)], prog=command, description="") is not None
    for flag, known in accepted.items():
        group, dot, name = flag.rpartition(".")
        switch = isinstance(known.value, bool)
        given = [f"--{group}{dot}no_{name}"] if switch else [f"--{flag}", str(known.value)]
        parse(config_class, [*given, "--train.seed", "3"], prog=command, description="")
        other = [f"--{flag}"] if switch else [f"--{flag}", "2"]
        file.write_text(f"{flag}: {True if switch else 2}\n")
        for refused in (other, ["--config", str(file)]):
            with pytest.raises(SystemExit):
                parse(config_class, refused, prog=command, description="")
            said = capsys.readouterr().err
            assert re.search(rf"{flag}.* is not available in this version; {re.escape(known.instead)}", said)


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
