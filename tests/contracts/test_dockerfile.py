"""The images for GPUs and for CPUs install as `make install` does; no image is built here."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lines_of(name: str) -> list[str]:
    """The instructions of a Dockerfile, one a line."""
    text = "".join(
        line for line in (ROOT / name).read_text().splitlines(keepends=True) if not line.lstrip().startswith("#")
    )
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize(("name", "backend"), [("Dockerfile", "gpu"), ("Dockerfile.cpu", "cpu")])
def test_what_is_copied_before_the_installation_is_all_that_it_reads(name, backend, tmp_path):
    lines = lines_of(name)
    (install,) = [line for line in lines if "compat/install.sh" in line]
    copied = [line.split()[1:] for line in lines[: lines.index(install)] if line.startswith("COPY ")]
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
    variable, _, value = variables.partition("=")
    done = subprocess.run(
        [tmp_path / "compat" / "install.sh", tmp_path],
        env={"PATH": "/usr/bin:/bin", variable: value},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"extras [{backend}]" in done.stdout
    named = re.findall(r"(?:readme|license-files) = \[?\"([^\"]+)\"", (ROOT / "pyproject.toml").read_text())
    assert named
    assert all(
        (tmp_path / file).is_file() for file in (*named, "pyproject.toml", "setup.py", "compat/flash-attn/setup.py")
    )
