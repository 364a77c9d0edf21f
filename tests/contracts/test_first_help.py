"""The help of every command, on a first page where flags are many and at once where they are few, and of every benchmark."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from lmm_r1 import cli, dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.plan import PLANNED, MachineFlags, planned_by
from lmm_r1.config import PPOConfig, SupervisedConfig, resolve

ROOT = Path(__file__).resolve().parents[2]
# More of them do not fit on three screens.
MANY = 40
MODULES = {name: importlib.import_module(f"lmm_r1.cli.{name}") for name in cli.COMMANDS}
CONFIGS = {name: module.CONFIG for name, module in MODULES.items() if "CONFIG" in vars(module)}
CONFIGS |= {f"plan {name}": planned_by(name) for name in PLANNED if name != "train_ppo_ray"}
LONG = {name: config for name, config in CONFIGS.items() if len(dotted.leaf_types(config)) > MANY}


def shown(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


def listed(page: str) -> set[str]:
    """The flags that a page of help describes, and not those that its sentences name."""
    return set(re.findall(r"^[│ ] ?(?:-h, )?--([a-z]\S*?)(?:,| |$)", page, re.MULTILINE)) - {"help"}


@pytest.mark.parametrize("name", LONG)
def test_help_begins_with_three_examples_and_the_usual_flags_at_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page, first = shown(capsys, *name.split(), "--help"), LONG[name].first_help
    assert max(map(len, page.splitlines())) <= 80
    assert page.count("\n  # ") == len(set(first.examples.values())) == 3
    assert re.findall(r"^  --(\S+)", page, re.MULTILINE) == first.flags.split()


@pytest.mark.parametrize("name", ["train_ppo_ray", "batch_inference"])
def test_help_all_lists_every_flag_and_help_of_a_command_with_few_does_so_at_once(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    flags = dotted.leaf_types(LONG[name])
    more = listed(shown(capsys, name, "--help-all")) - set(flags)
    assert not set(flags) - listed(shown(capsys, name, "--help-all"))
    # A switch is listed with what turns it off.
    assert {re.sub(r"(^|\.)no_", r"\1", flag) for flag in more} <= {
        flag for flag in flags if dotted.is_switch(flags[flag])
    }
    few = dotted.leaf_types(CONFIGS["merge"])
    assert listed(shown(capsys, "merge", "--help")) == listed(shown(capsys, "merge", "--help_all")) == set(few)


@pytest.mark.parametrize("name", LONG)
def test_the_examples_of_a_first_page_are_accepted_as_they_stand(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    for arguments in LONG[name].first_help.examples.values():
        config = parse(LONG[name], shlex.split(arguments), prog=name, description="")
        if isinstance(config, PPOConfig | SupervisedConfig) and not isinstance(config, MachineFlags):
            resolve(config)
