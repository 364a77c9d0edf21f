"""`make release VERSION=X.Y.Z` writes the version into all files that have it, or nothing."""

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = '[project]\nname = "x"\nversion = "0.9.1"\n'
INSTALLATION = 'pip install "dist/lmm_r1-0.9.1-py3-none-any.whl"\n'
CHANGES = "# Changes\n\n## Unreleased\n\nAdded\n\n## 0.9.1\n"
FILES = {"pyproject.toml": PROJECT, "remote_rm/pyproject.toml": PROJECT, "docs/installation.md": INSTALLATION}


def release(folder: Path, version: str, *, changes: str = CHANGES) -> str:
    """Run the command in a folder and return what it refuses, empty if nothing."""
    for name, text in {**FILES, "CHANGELOG.md": changes}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, ROOT / ".ci/release.py", version, "--root", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not done.stderr)
    return done.stderr


def test_the_version_and_its_changes_are_written(tmp_path):
    assert release(tmp_path, "0.10.0") == ""
    for name, text in FILES.items():
        assert (tmp_path / name).read_text() == text.replace("0.9.1", "0.10.0")
    heading = f"## 0.10.0 ({date.today().isoformat()})"
    assert (tmp_path / "CHANGELOG.md").read_text() == CHANGES.replace("## Unreleased", heading)


@pytest.mark.parametrize(
    ("version", "changes", "said"),
    [
        ("0.9.1", CHANGES, "VERSION 0.9.1 must be three numbers, X.Y.Z, above 0.9.1"),
        ("v1.0", CHANGES, "VERSION v1.0 must be three numbers"),
        ("1.0.0", "# Changes\n\n## 0.9.1\n", "must have one heading '## Unreleased'"),
    ],
)
def test_what_cannot_be_released_changes_nothing(version, changes, said, tmp_path):
    assert said in release(tmp_path, version, changes=changes)
    assert (tmp_path / "pyproject.toml").read_text() == PROJECT
    assert (tmp_path / "CHANGELOG.md").read_text() == changes
