"""The wheel: all that commands need is in it, and it works where nothing of the repository is."""

from __future__ import annotations

import ast
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lmm_r1", "remote_rm")
BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
ALONE = ROOT / "remote_rm"
"""A project of its own, too."""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def build_wheel(folder: Path) -> Path:
    """Build into a folder and return the wheel."""
    source = folder / "source"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "datasets/recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in BESIDE:
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    """The files that an installation would have, without those about the distribution."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not re.match(r"[^/]+\.dist-info/", name)}


pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "examples/quickstart.ipynb"


@pytest.fixture(scope="module")
def wheel(built_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    (found,) = built_once("wheel", lambda folder: build_wheel(folder) and None).glob("*.whl")
    return found


def test_every_file_of_the_packages_and_every_recipe_is_in_the_wheel_and_nothing_else(wheel):
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path != ALONE / "pyproject.toml"
    }
    recipes = {f"lmm_r1/tools/recipes/published/{path.name}" for path in (ROOT / "datasets/recipes").glob("*.yaml")}
    assert len(recipes) > 40
    assert names_in(wheel) == files | recipes


def test_remote_rm_alone_makes_a_wheel_of_all_its_files(tmp_path):
    source = tmp_path / "remote_rm"
    shutil.copytree(ALONE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    files = {str(path.relative_to(tmp_path)) for path in source.rglob("*") if path.is_file()}
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True, timeout=300)
    (wheel,) = tmp_path.glob("remote_rm-*.whl")
    assert names_in(wheel) == files - {"remote_rm/pyproject.toml"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, whose other packages are those of this one; nothing leads to the repository."""
    folder = tmp_path_factory.mktemp("outside")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    # Whatever of this project a PYTHONPATH leads to.
    flags = ("--quiet", "--no-deps", "--no-index", "--ignore-installed")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *flags, wheel]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    # Of a folder that a file like this names, files like this are not read: the editable installation stays out.
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return folder


def outside(installed: Path, *command: str | Path) -> str:
    """What a command of the environment prints, in a folder beside it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment |= {"PATH": f"{installed / 'venv/bin'}:{os.environ['PATH']}", "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=installed, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.full
def test_outside_of_the_repository_the_commands_and_the_notebook_run_from_the_wheel(installed):
    python = installed / "venv/bin/python"
    places = outside(installed, python, "-c", "import lmm_r1, remote_rm; print(lmm_r1.__file__, remote_rm.__file__)")
    assert all(Path(place).is_relative_to(installed) for place in places.split())
    kits = outside(installed, "lmm-r1", "kits")
    assert "qwen2_5_vl" in kits
    listed = outside(installed, "lmm-r1", "evaluate", "--list_suites")
    assert "mathvista" in listed

    said = outside(installed, python, ROOT / "tests/helpers/notebook_cells.py", NOTEBOOK, installed)
    shown = [line.removeprefix("shown: ") for line in said.splitlines() if line.startswith("shown: ")]
    returned = [line.removeprefix("returned: ") for line in said.splitlines() if line.startswith("returned: ")]
    assert any(re.match(r"sft: \d+ steps in .*; the model is in runs/notebook/cold", line) for line in shown)
    assert any(re.match(r"rl step 1/\d+  reward", line) for line in shown)
    rewards = next(ast.literal_eval(line) for line in returned if line.startswith("[(1, "))
    first, last = ([value for _, value in rewards[:4]], [value for _, value in rewards[-4:]])
    assert sum(last) > sum(first)
    measured = next(ast.literal_eval(line) for line in returned if line.startswith("{'cold'"))
    assert measured["rl"] > measured["cold"]
