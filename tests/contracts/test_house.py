"""The checks of layers, types and budgets that `make check` makes: each fails on a planted breach."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lmm_r1", "remote_rm")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the code and its settings, in which something can be broken."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name(command), *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        ("lmm_r1/data/messages.py", "import lmm_r1.lmm_kits", "lmm_r1.data is not allowed to import lmm_r1.lmm_kits"),
        ("lmm_r1/chat/loop.py", "import lmm_r1.batch", "lmm_r1.chat is not allowed to import lmm_r1.batch"),
        ("remote_rm/client.py", "import lmm_r1.errors", "remote_rm is not allowed to import lmm_r1"),
        ("lmm_r1/newroom.py", "", "newroom"),
    ],
)
def test_an_import_against_the_order_of_the_rooms_fails(copied: Path, module: str, line: str, said: str):
    path = copied / module
    before = path.read_text() if path.exists() else ""
    path.write_text(f"{before}\n{line}\n")
    checked = run(copied, "lint-imports", "--no-logo", "--no-cache")
    assert checked.returncode == 1, checked.stdout
    assert said in checked.stdout


def test_a_type_that_does_not_fit_fails(copied: Path):
    path = copied / "lmm_r1" / "dotted.py"
    path.write_text(path.read_text() + "\n\ndef planted(number: int) -> str:\n    return number\n")
    # One module and what it imports, not the whole house: it would take most of a minute.
    checked = run(copied, "mypy", "--cache-dir", str(copied / "cache"), "-p", "lmm_r1.dotted")
    assert checked.returncode == 1, checked.stdout
    assert 'Incompatible return value type (got "int", expected "str")' in checked.stdout


def test_the_house_is_within_its_budgets():
    checked = budgets(ROOT)
    assert checked.returncode == 0, checked.stderr


def test_a_module_and_a_function_over_budget_fail(copied: Path):
    for folder in ("tests", "benchmarks", "docs"):
        (copied / folder).mkdir()
    (copied / "README.md").write_text("one\ntwo\n")
    count = len([*copied.glob("lmm_r1/**/*.py"), *copied.glob("remote_rm/**/*.py")])
    settings = copied / "pyproject.toml"
    settings.write_text(re.sub(r"(?m)^modules = \d+", f"modules = {count}", settings.read_text()))
    (copied / "lmm_r1" / "planted.py").write_text("def long() -> None:\n" + "    pass\n" * 100)
    checked = budgets(copied)
    assert checked.returncode == 1
    assert f"modules: {count + 1}, budget {count}" in checked.stderr
    assert "lmm_r1/planted.py:1: long has 100 lines" in checked.stderr


def budgets(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / ".ci" / "budgets.py"], cwd=folder, capture_output=True, text=True)
