"""The sizes of released checkpoints by their names on the Hugging Face hub, so that a plan needs no download."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

FILE = "released.json"


@functools.cache
def released_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return by name what a checkpoint's config.json says of its size (`config`), and how many `parameters` it has."""
    return json.loads((resources.files("lmm_r1.lmm_kits") / FILE).read_text(encoding="utf-8"))


@functools.cache
def released_folder(name: str) -> Path:
    """Return a folder with the config of a released checkpoint, enough to plan with; it is deleted when the process ends."""
    folder = Path(_folders().name) / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(released_configs()[name]["config"]), encoding="utf-8")
    return folder


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="released_")
