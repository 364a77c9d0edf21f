"""The checkpoints in a folder, and which of them are whole.

A checkpoint is written as `.saving-TAG`. It gets its tag's name once every rank has written its shards, and with it a
marker that lists them; what goes is renamed before it is deleted. So a run may be killed at any moment, as long as
renaming is atomic and all ranks see the same folder."""

from __future__ import annotations

import functools
import json
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MARKER = "complete.json"
LATEST = "latest"
SAVING = ".saving-"
REFERENCE_FOLDER = "_reference"
"""The folder, next to the checkpoints of an RL run's models, of the reference's weights if the reference follows the policy."""
# OpenRLHF writes it once a save has ended.
METRIC = "metric.json"
_TAG = re.compile(r"(best_)?global_step(\d+)")
_SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint."""

    tag: str
    step: int
    is_best: bool
    session: str | None
    """The process or cluster that saved it; None if there is no marker."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """The file that marks a finished save."""

    session: str
    files: Mapping[str, int]
    """Sizes in bytes of the shards of all ranks, by name."""


def step_of(tag: str) -> int:
    """Return the step of `global_step12` or `best_global_step12`; raises ValueError for another tag."""
    match = _TAG.fullmatch(tag)
    if match is None:
        raise ValueError(f"{tag!r} is no tag of a checkpoint; give global_step12, or best_global_step12")
    return int(match[2])


def is_best(tag: str) -> bool:
    """Say whether a tag is that of the best checkpoint."""
    return tag.startswith("best")


def whole_checkpoints(folder: Path) -> dict[str, Checkpoint]:
    """Return the folder's whole checkpoints by tag."""
    whole = {}
    for tag in tags(folder):
        if defect(folder, tag) is None:
            marker = read_marker(folder / tag / MARKER)
            session = None if marker is None else marker.session
            whole[tag] = Checkpoint(tag=tag, step=step_of(tag), is_best=is_best(tag), session=session)
    return whole


def defect(folder: Path, tag: str) -> str | None:
    """Return what a checkpoint lacks; None if it is complete.

    One with a marker is whole when every listed shard is there in its size. One without is of OpenRLHF or of an older
    version: it is whole when the save had ended (`latest` names it, or its metric file is there), no shard's number is
    missing, and every file is closed.
    """
    path = folder / tag
    if not path.is_dir():
        return "it is not there"
    if (path / MARKER).is_file():
        marker = read_marker(path / MARKER)
        return f"its {MARKER} cannot be read" if marker is None else lost_shard(path, marker.files)
    if read_latest(folder) != tag and not (path / METRIC).is_file():
        return "its save has not ended"
    return _unmarked_defect(path)


def damaged_shard(path: Path) -> str | None:
    """Return a sentence about a shard of a checkpoint whose bytes have changed since it was written; None if all are intact.

    Reads all of them, and compares them with the checksums that PyTorch writes.
    """
    for file in sorted(path.glob("*_states.pt")):
        found = file.stat()
        if not _is_intact(file, found.st_size, found.st_mtime_ns):
            return f"{file.name} is damaged: its bytes are not those that were written"
    return None


@functools.lru_cache(maxsize=4096)
def _is_intact(file: Path, size: int, mtime_ns: int) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError):
        return False


def read_latest(folder: Path) -> str | None:
    """Return the tag in the file `latest`, "" if it is empty, None if there is no such file."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def is_tag(name: str) -> bool:
    """Say whether a folder of this name is a checkpoint."""
    return _TAG.fullmatch(name) is not None


def tags(folder: Path) -> list[str]:
    """Return the tags of all checkpoints, whole or not."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if is_tag(path.name) and path.is_dir())


def metric_of(file: Path) -> float | None:
    """Return the metric in a checkpoint's metric file, None if it has none that is finite."""
    try:
        value = float(json.loads(file.read_text())["metric_value"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if math.isfinite(value) else None


def best_metric(folder: Path, *, key: str) -> float | None:
    """Return the metric of the newest complete best checkpoint in a folder; None if there is none."""
    best = [tag for tag in tags(folder) if is_best(tag) and defect(folder, tag) is None]
    for tag in sorted(best, key=step_of, reverse=True):
        file = folder / tag / METRIC
        try:
            named = json.loads(file.read_text())["metric_key"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if named == key:
            return metric_of(file)
    return None


def saving_name(tag: str) -> str:
    """Return the name under which a checkpoint is written."""
    return f"{SAVING}{tag}"


def read_marker(file: Path) -> Marker | None:
    """Return a marker's content; None if no marker can be read."""
    try:
        content = json.loads(file.read_text())
        return Marker(session=str(content["session"]), files=dict(content["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def lost_shard(path: Path, files: Mapping[str, int]) -> str | None:
    """Return a sentence about a listed file that is missing or has another size; None if all are complete."""
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def _unmarked_defect(path: Path) -> str | None:
    names = {file.name for file in path.glob("*_states.pt")}
    if not any(name.endswith("_model_states.pt") for name in names):
        return "it has no *_model_states.pt"
    shards: dict[str, set[tuple[int, int]]] = {"model": set(), "optim": set()}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        shards[match[3]].add((int(match[1]), int(match[2])))
    ranks, groups = ({place[axis] for place in shards["model"] | shards["optim"]} for axis in (0, 1))
    every = {(rank, group) for rank in range(max(ranks, default=-1) + 1) for group in groups}
    # Under ZeRO 1 and 2 one file holds the weights, and every rank has its part of the optimizer.
    for kind, found in shards.items():
        if found != every and (found or kind == "optim"):
            rank, group = min(every - found)
            return f"the {kind} states of rank {rank} (of model-parallel rank {group}) are missing"
    torn = sorted(name for name in names if not zipfile.is_zipfile(path / name))
    return f"{torn[0]} was not written to its end" if torn else None
