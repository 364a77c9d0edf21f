"""Names of other trainers, and names with typing errors, are answered with ours or with none."""

import importlib
import re

import pytest
from helpers.tables import table

from lmm_r1 import cli, dotted
from lmm_r1.cli.arguments import YamlError, parse_settings
from lmm_r1.config import PPOConfig
from lmm_r1.tools.migrate import _FOREIGN, TYPED, counterpart, renamed
from lmm_r1.tools.migrate.table import CONFIG_CLASSES


def cases(part: str) -> list[tuple[str, str, str]]:
    return [(command, *case) for command, names in table("cli/other_names", part).items() for case in names.items()]


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def sentence(said: str) -> str:
    return said if " " in said else f"is --{said} here"


@pytest.mark.parametrize(("command", "typed", "said"), [*cases("flags"), *cases("only_flags")])
def test_a_flag_of_another_trainer_is_answered_with_ours_or_with_none(command, typed, said, capsys):
    message = refusal(capsys, *command.split(), f"--{typed}", "1")
    if said:
        assert message.startswith(f"lmm-r1 {command}: error: --{typed.partition('=')[0]} {sentence(said)}")
    else:
        assert "did you mean" not in message
        assert "here" not in message


@pytest.mark.parametrize(("command", "typed", "said"), cases("flags"))
def test_a_name_of_another_trainer_in_a_file_is_answered_with_ours_or_with_none(command, typed, said):
    group, dot, name = typed.rpartition(".")
    text = f"train.seed: 1\n{group}:\n  {name}: 1\n" if dot else f"train.seed: 1\n{typed}: 1\n"
    answer = f"{typed} {sentence(said).replace('--', '')}" if said else f"unknown key {typed}$"
    with pytest.raises(YamlError, match=f"^f.yaml:{3 if dot else 2}: {re.escape(answer) if said else answer}"):
        parse_settings(text, dotted.leaf_types(CONFIG_CLASSES[command]), source="f.yaml")


@pytest.mark.parametrize(("typed", "meant"), table("cli/other_names", "typing_errors"))
def test_a_name_with_typing_errors_is_answered_with_the_near_one(typed, meant, capsys):
    said = f"did you mean --{meant}?" if meant else "lmm-r1 train_ppo_ray --help-all lists them all"
    message = refusal(capsys, "train_ppo_ray", f"--{typed}", "1")
    assert message == f"lmm-r1 train_ppo_ray: error: unknown flag --{typed}; {said}\n"
    said = f"; did you mean {meant}?" if meant else ""
    with pytest.raises(YamlError, match=f"^2: unknown key {typed}{re.escape(said)}$".replace("2:", "f:1:")):
        parse_settings(f"{typed}: 1", dotted.leaf_types(PPOConfig), source="f")


@pytest.mark.parametrize(("typed", "meant"), table("cli/other_names", "commands").items())
def test_a_command_by_another_name_is_answered_with_ours(typed, meant, capsys):
    said = f"did you mean {meant}?" if meant else "`lmm-r1 --help` lists the commands"
    assert refusal(capsys, *typed.split()) == f"lmm-r1: error: unknown command {typed.split()[-1]}; {said}\n"


def flags_of(command: str) -> set[str]:
    module = importlib.import_module(f"lmm_r1.cli.{command}")
    if "build_parser" in vars(module):
        return {action.dest for action in module.build_parser()._actions}
    return set(dotted.leaf_types(module.CONFIG)) if "CONFIG" in vars(module) else set()


def test_every_flag_that_is_advised_exists_in_the_command_that_was_typed():
    known = {command: flags_of(command) for command in cli.COMMANDS}
    names = {*TYPED, *(name for one in _FOREIGN for name in (*one.by_name, *one.names))}
    advised = {
        (command, name, flag)
        for command, flags in known.items()
        for name in names - flags
        for flag in re.findall(
            r"--([a-z][\w.]*\w)", (counterpart(name, known=flags) or "") + (renamed(name, known=flags) or "")
        )
    }
    # A short form of flags, and what belongs to the program that the sentence names, `deepspeed` or llm_judge.
    others = {"reward", "num_gpus", "num_nodes", "judge"}
    assert {one for one in advised if one[2] not in known[one[0]] | others} == set()
    # None of the table's names is for a flag that no command has.
    assert set().union(*TYPED.values()) - {"temperature=0"} <= {flag for _, _, flag in advised}
