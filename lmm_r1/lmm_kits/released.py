"""The sizes of released checkpoints by their names on the Hugging Face hub, so that a plan needs no download."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

FILE = "released.json"


@functools.cache
def released_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return by name what a checkpoint's config.json says of its size (`config`), and how many `parameters` it has."""
    return json.loads((resources.files("lmm_r1.lmm_kits") / FILE).read_text(encoding="utf-8"))


def write_released(name: str, folder: Path) -> None:
    """Write the config of a released checkpoint into a new folder: enough to plan with, not to train."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(released_configs()[name]["config"]), encoding="utf-8")
