"""The scripts that let a shell complete commands, flags and choices: asked as the shell asks them."""

import contextlib
import io
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1.cli import COMMANDS, main
from lmm_r1.cli.completion import flags_of

ASK = """
source "$1"
shift
COMP_WORDS=(lmm-r1 "$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_lmm_r1
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["completion", "bash"])
    path = tmp_path_factory.mktemp("completion") / "lmm-r1.bash"
    path.write_text(printed.getvalue())
    return path


@pytest.mark.parametrize(("line", "offered"), table("cli/completion", "bash_offers_commands_flags_and_choices"))
def test_bash_offers_commands_flags_and_choices(line, offered, script, tmp_path):
    (tmp_path / "rows.jsonl").touch()
    asked = subprocess.run(
        ["bash", "-c", ASK, "bash", str(script), *line], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (sorted(asked.stdout.split()), asked.stderr) == (sorted(offered), "")


def test_every_command_is_known_with_its_flags():
    assert [name for name in COMMANDS if not flags_of(name)] == ["serve_verifier"]
    assert "--task" not in flags_of("make_task")
    assert "--reward" in flags_of("train_ppo_ray")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script(capsys, tmp_path):
    main(["completion", "zsh"])
    (tmp_path / "_lmm-r1").write_text(capsys.readouterr().out)
    subprocess.run(["zsh", "-n", str(tmp_path / "_lmm-r1")], check=True, capture_output=True)
