"""README.md: its commands, files and targets exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_make_targets_of_the_page_are_there():
    targets = set(re.findall(r"^make ([\w-]+)", PAGE, flags=re.MULTILINE))
    assert {"install", "demo", "test"} <= targets
    targets |= set(re.findall(r"`?make ([\w-]+)", PAGE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_the_page_names_commands_files_and_a_version_of_python_that_exist():
    from lmm_r1.cli import COMMANDS

    assert set(re.findall(r"lmm-r1 (\w+)", PAGE)) <= set(COMMANDS)
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGE)]
    assert [link for link in links if not (ROOT / link).exists()] == []
    [oldest] = re.findall(r"Python ([\d.]+)\+", PAGE)
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_command_is_on_the_page_of_commands():
    from lmm_r1.cli import COMMANDS

    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {name for name in COMMANDS if f"`{name}`" not in page} == set()
