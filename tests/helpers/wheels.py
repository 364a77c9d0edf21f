"""The wheel of this project, built from a copy of its files, without a network."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lmm_r1", "remote_rm")
BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
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
        return {name for name in archive.namelist() if ".dist-info/" not in name}
