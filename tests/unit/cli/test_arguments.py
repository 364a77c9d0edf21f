"""The command line and YAML files become a frozen dataclass, or one sentence and an exit code."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import pytest
from helpers.tables import table

from lmm_r1.cli import main, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.ppo import EstimatorName, PPOConfig
from lmm_r1.errors import ListedError, UserError


@dataclass(frozen=True, kw_only=True)
class Adam:
    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    clip: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Actor:
    name: str | None = None
    freeze: bool = False
    adam: Adam = field(default_factory=lambda: Adam(lr=2e-6))


@dataclass(frozen=True, kw_only=True)
class Stage:
    output: Path
    """Where to write."""
    max_rows: int | None = None
    level: Literal["off", "token"] = "token"
    names: tuple[str, ...] = ()
    actor: Actor = field(default_factory=Actor)


def run(*argv: str) -> Stage:
    return parse(Stage, argv, prog="lmm-r1 stage", description="Run a stage.")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        run(*argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def write(folder: Path, text: str) -> str:
    path = folder / "stage.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], Stage(output=Path("o"))),
        (["--max_rows", "3"], Stage(output=Path("o"), max_rows=3)),
        (["--max-rows=3"], Stage(output=Path("o"), max_rows=3)),
        (["--max_rows", "None"], Stage(output=Path("o"))),
        (["--max_rows", "-3"], Stage(output=Path("o"), max_rows=-3)),
        # The last of a repeated flag counts.
        (["--names", "a", "b", "--names", "c"], Stage(output=Path("o"), names=("c",))),
        # A switch takes no value, and a pair takes two.
        (
            ["--actor.freeze", "--actor.adam.betas", "0.5", "0.75", "--actor.adam.clip", "-1", "2"],
            Stage(
                output=Path("o"),
                actor=Actor(freeze=True, adam=Adam(lr=2e-6, betas=(0.5, 0.75), clip=(-1.0, 2.0))),
            ),
        ),
        (["--actor.adam.lr", "-1e-3"], Stage(output=Path("o"), actor=Actor(adam=Adam(lr=-1e-3)))),
    ],
)
def test_flags_set_values_and_defaults_hold_without_them(argv, expected):
    assert run("--output", "o", *argv) == expected


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--max_rows", "many"], "--max_rows must be a whole number, not 'many'"),
        (["--max_rows=1.5"], "--max_rows must be a whole number, not '1.5'"),
        (["--actor.adam.lr", "fast"], "--actor.adam.lr must be a number, not 'fast'"),
        (["--level", "of"], "--level must be one of off, token, not 'of'; did you mean off?"),
        (["--level"], "--level needs a value: one of off, token"),
        (["stray"], "unexpected argument stray; lmm-r1 stage --help lists all flags"),
    ],
)
def test_what_is_wrong_with_a_value_is_said_in_a_line(argv, told, capsys):
    assert refused(capsys, "--output", "o", *argv) == f"lmm-r1 stage: error: {told}\n"


def test_a_missing_flag_ends_with_code_two(capsys):
    told = "--output is missing (Where to write); lmm-r1 stage --help lists all flags"
    assert refused(capsys) == f"lmm-r1 stage: error: {told}\n"


@pytest.mark.parametrize(
    ("elsewhere", "here"),
    [
        ("grpo", "group_norm"),
        ("PPO", "gae"),
        ("reinforce++", "reinforce"),
        ("reinforce++-baseline", "reinforce_baseline"),
    ],
)
def test_an_estimator_by_the_name_of_its_paper_is_answered_with_its_name_here(elsewhere, here, tmp_path, capsys):
    told = f"algo.advantage.estimator must be one of {', '.join(get_args(EstimatorName))}, not '{elsewhere}'"
    file = write(tmp_path, f"algo.advantage.estimator: {elsewhere}\n")
    for argv, place in ((["--algo.advantage.estimator", elsewhere], "--"), (["--config", file], f"{file}:1: ")):
        with pytest.raises(SystemExit) as stopped:
            parse(PPOConfig, argv, prog="p", description="")
        assert stopped.value.code == 2
        assert capsys.readouterr().err == f"p: error: {place}{told}, which is called {here} here\n"


def test_yaml_lies_over_the_defaults_and_under_the_flags(tmp_path):
    path = write(tmp_path, "output: from_yaml\nactor:\n  name: yaml\n  adam:\n    lr: 3e-4\n    betas: [0.1, 0.2]\n")
    stage = run("--actor.name", "flag", "--config", path)
    assert stage.output == Path("from_yaml")
    assert stage.actor == Actor(name="flag", adam=Adam(lr=3e-4, betas=(0.1, 0.2)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "output: o\nactor:\n  adam.lr: 1\nactor.freeze: true\nmax-rows: 4\n",
            {"max_rows": 4, "freeze": True, "lr": 1.0},
        ),
        # Values are read as the flag asks, and not as YAML guesses.
        ("output: 12\nlevel: off\nactor:\n  name: no\n  adam.lr: 1e-5\n", {"level": "off", "name": "no", "lr": 1e-5}),
        ("output: o\nactor.name: null\n", {"name": None}),
        ("output: o\nactor.name: 'null'\n", {"name": "null"}),
    ],
)
def test_yaml_keys_are_nested_or_dotted_and_values_are_read_by_their_flag(tmp_path, text, expected):
    stage = run("--config", write(tmp_path, text))
    values = vars(stage) | vars(stage.actor) | vars(stage.actor.adam)
    assert {name: values[name] for name in expected} == expected


def test_of_two_yaml_files_the_later_one_wins(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("output: o\nmax_rows: 1\nlevel: off\n", encoding="utf-8")
    second.write_text("max_rows: 2\n", encoding="utf-8")
    stage = run("--config", str(first), "--config", str(second))
    assert (stage.max_rows, stage.level) == (2, "off")


@pytest.mark.parametrize(
    ("text", "expected"), table("cli/arguments", "what_is_wrong_in_yaml_is_named_with_file_and_line")
)
def test_what_is_wrong_in_yaml_is_named_with_file_and_line(tmp_path, capsys, text, expected):
    path = write(tmp_path, text)
    message = refused(capsys, "--config", path)
    assert message.startswith(f"lmm-r1 stage: error: {path}{expected}")
    assert message.count("\n") == 1


def test_a_config_file_that_is_missing_or_not_named_is_an_error(tmp_path, capsys):
    assert "No such file" in refused(capsys, "--config", str(tmp_path / "none.yaml"))
    assert "--config needs a file" in refused(capsys, "--config")


def test_a_user_error_becomes_one_line_and_exit_code_one(capsys):
    with pytest.raises(SystemExit) as stopped, user_errors("lmm-r1 stage"):
        raise UserError("rows.jsonl:3: no answer")
    assert stopped.value.code == 1
    assert capsys.readouterr().err == "lmm-r1 stage: error: rows.jsonl:3: no answer\n"


@pytest.mark.parametrize(("rank", "lines"), [("0", "\n  rows line 1: odd\n  rows line 3: odd"), ("1", "")])
def test_several_things_that_are_wrong_have_a_line_each_on_one_rank(rank, lines, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as stopped, user_errors("lmm-r1 stage"):
        raise ListedError("rows: 2 of its 3 rows cannot be used:", ["rows line 1: odd", "rows line 3: odd"])
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"lmm-r1 stage: error: rows: 2 of its 3 rows cannot be used:{lines}\n"


def test_a_workers_user_error_is_shown_without_rays_traceback(capsys):
    class RayTaskError(UserError):
        """What Ray raises, made of the class of its cause: its text is a traceback."""

        cause = UserError("this model has no vision tower")

    with pytest.raises(SystemExit), user_errors("lmm-r1 stage"):
        raise RayTaskError("ray::Worker.load()\n  File ...")
    assert capsys.readouterr().err == "lmm-r1 stage: error: this model has no vision tower\n"


def test_other_errors_keep_their_traceback():
    with pytest.raises(KeyError), user_errors("lmm-r1 stage"):
        raise KeyError("ours")


def test_the_dispatcher_knows_its_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("lmm-r1 ")


def test_help_lists_the_commands_or_the_flags_of_one(capsys):
    main(["help"])
    assert "\n\ntrain:\n  train_ppo_ray " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["help", "report"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: lmm-r1 report")
