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


def test_the_plan_of_the_page_is_accepted_for_a_checkpoint_whose_sizes_are_known():
    from lmm_r1.cli.arguments import parse
    from lmm_r1.cli.plan import CONFIG
    from lmm_r1.lmm_kits.registry import released_configs

    [line] = re.findall(r"^lmm-r1 plan (.*)$", PAGE, flags=re.MULTILINE)
    config = parse(CONFIG, line.split(), prog="lmm-r1 plan", description="")
    assert config.actor.model_name_or_path in released_configs()
    assert (config.num_gpus, config.gpu_memory_gib) == (1, 80.0)


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
