"""The image for GPUs installs as `make install` does; no image is built here."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def test_what_is_copied_before_the_installation_is_all_that_it_reads(tmp_path):
    (install,) = [line for line in LINES if "compat/install.sh" in line]
    copied = [line.split()[1:] for line in LINES[: LINES.index(install)] if line.startswith("COPY ")]
    for *sources, target in copied:
        for source in sources:
            place = tmp_path if target == "./" else tmp_path / target
            subprocess.run(["cp", "-r", ROOT / source, place], check=True)
    (tmp_path / "bin").mkdir()
    # Notes what pip would install.
    python = tmp_path / "bin" / "python"
    python.write_text(
        '#!/usr/bin/env bash\n[[ $1 == -m ]] && echo "Installing $*"\n[[ $1 == --version ]] && echo Python\n[[ $1 != -c ]]\n'
    )
    python.chmod(0o755)
    (variables,) = re.findall(r"(LMM_R1_BACKEND=\w+) compat/install.sh", install)
    name, _, value = variables.partition("=")
    done = subprocess.run(
        [tmp_path / "compat" / "install.sh", tmp_path],
        env={"PATH": "/usr/bin:/bin", name: value},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "extras [gpu]" in done.stdout
    named = re.findall(r"(?:readme|license-files) = \[?\"([^\"]+)\"", (ROOT / "pyproject.toml").read_text())
    assert named
    assert all(
        (tmp_path / file).is_file() for file in (*named, "pyproject.toml", "setup.py", "compat/flash-attn/setup.py")
    )
