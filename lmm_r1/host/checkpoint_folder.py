"""The checkpoints in a folder: which are complete, and how they are written and deleted."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import logging
import math
import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import writing

MARKER = "complete.json"
LATEST = "latest"
SAVING = ".saving-"
# OpenRLHF writes it once a save has ended.
METRIC = "metric.json"
_TAG = re.compile(r"(best_)?global_step(\d+)")


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
    """Return what a checkpoint lacks; None if every shard that its marker lists exists and has its size.

    One of OpenRLHF has no marker, and is complete if `latest` names it.
    """
    path = folder / tag
    if not path.is_dir():
        return "it is not there"
    if not (path / MARKER).is_file():
        return None if read_latest(folder) == tag else f"it has no {MARKER}"
    marker = read_marker(path / MARKER)
    return f"its {MARKER} cannot be read" if marker is None else lost_shard(path, marker.files)


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


logger = logging.getLogger(__name__)

DELETING = ".deleting-"
_GIB = 1024**3


def begin(folder: Path, tag: str) -> None:
    """Delete unfinished saves of killed sessions before a save. Raises ValueError for an invalid tag."""
    step_of(tag)
    folder.mkdir(parents=True, exist_ok=True)
    finish_interrupted(folder)
    _discard_leftovers(folder)


def flush(path: Path) -> int:
    """Wait until a file is on the disk, and return its size in bytes."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size


def mark_complete(folder: Path, tag: str, *, files: Mapping[str, int], session: str) -> None:
    """Give a saved checkpoint its tag's name, in place of an earlier one of that name.

    Args:
        files: sizes of the shards that all ranks report as written, by name.

    Raises UserError if one of them is not seen here: the ranks do not share the folder.
    """
    saving = folder / saving_name(tag)
    lost = lost_shard(saving, files)
    if lost is not None:
        raise UserError(
            f"--ckpt.path: {lost} in {saving.absolute()}, though a rank has written it; "
            "all machines of a run must share this folder"
        )
    marker = {"step": step_of(tag), "session": session, "files": dict(files)}
    _write(saving / MARKER, json.dumps(marker, indent=2) + "\n")
    _put_in_place(folder, tag)


def write_latest(folder: Path, tag: str) -> None:
    """Let `latest` name a checkpoint; the file holds the tag before it or this one, and is never empty."""
    _write(folder / LATEST, tag)


def evict(folder: Path, *, saved: str, max_num: int, max_mem: float) -> None:
    """Delete checkpoints down to the limits after `saved` was saved.

    What goes first: torn ones, then those without a metric, then those with the worst one, then the oldest. Neither
    `saved` nor what `latest` names goes, nor the best checkpoint, unless `saved` is a new best one. The best one does
    not count towards `max_num`, and saving it takes no other's place.

    Args:
        max_num: of checkpoints that are kept.
        max_mem: GiB that all of them may take.
    """
    _discard_leftovers(folder)
    kept = {saved, read_latest(folder)}
    if is_best(saved):
        for tag in tags(folder):
            if is_best(tag) and tag not in kept:
                _discard(folder, tag)
    while True:
        regular = [tag for tag in tags(folder) if not is_best(tag)]
        too_many = not is_best(saved) and len(regular) > max_num
        if not too_many and _bytes_in(folder) <= max_mem * _GIB:
            return
        candidates = sorted((_rank(folder, tag), tag) for tag in regular if tag not in kept)
        if not candidates:
            return
        _discard(folder, candidates[0][1])


def finish_interrupted(folder: Path) -> None:
    """Give those saves their tags' names that were killed between the marker and the rename."""
    if not folder.is_dir():
        return
    for path in sorted(folder.glob(f"{SAVING}*")):
        marker = read_marker(path / MARKER)
        if marker is not None and lost_shard(path, marker.files) is None:
            _put_in_place(folder, path.name.removeprefix(SAVING))


def _rank(folder: Path, tag: str) -> tuple[bool, bool, float, float, int]:
    """Return the sort key of a checkpoint: those to be deleted first come first."""
    metric = metric_of(folder / tag / METRIC)
    age = (folder / tag).stat().st_mtime
    return defect(folder, tag) is None, metric is not None, -math.inf if metric is None else metric, age, step_of(tag)


def _put_in_place(folder: Path, tag: str) -> None:
    old = _free_name(folder, tag)
    if (folder / tag).exists():
        (folder / tag).rename(old)
    (folder / saving_name(tag)).rename(folder / tag)
    _flush_folder(folder)
    _delete(old)


def _free_name(folder: Path, name: str) -> Path:
    """Return an unused name for a folder to be deleted; earlier ones may still exist."""
    return next(path for number in itertools.count() if not (path := folder / f"{DELETING}{name}.{number}").exists())


def _discard(folder: Path, tag: str) -> None:
    """Delete a checkpoint and the copy in Hugging Face format next to it."""
    for name in (tag, f"{tag}_hf"):
        if (folder / name).is_dir():
            going = _free_name(folder, name)
            (folder / name).rename(going)
            _delete(going)


def _discard_leftovers(folder: Path) -> None:
    for pattern in (f"{SAVING}*", f"{DELETING}*"):
        for path in folder.glob(pattern):
            _delete(path)


def _delete(path: Path) -> None:
    if not path.exists():
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        # It counts no longer, and is tried again at the next save.
        logger.warning("%s could not be deleted (%s)", path, error)


def _bytes_in(folder: Path) -> int:
    files = (file for child in folder.iterdir() if child.is_dir() for file in child.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with writing(path), partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Wait until the renames in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems support this only for files.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoint from which a run resumes."""

    tag: str | None
    """None if no checkpoint is complete in every folder."""
    passed_over: tuple[str, ...] = ()
    """What should have been taken and could not be, and why."""


def resume_point(folders: Sequence[Path]) -> ResumePoint:
    """Return the checkpoint from which a run resumes: one tag for all of its models, complete in each one's folder.

    It is the one in `latest` if that is complete and the same everywhere; else the newest that all folders have. A
    save that was killed between its marker and its rename is brought to its end. One with changed bytes is passed over.
    """
    for folder in folders:
        finish_interrupted(folder)
    first, *others = [whole_checkpoints(folder) for folder in folders]
    common = {  # whole in every folder, and saved together
        tag: checkpoint
        for tag, checkpoint in first.items()
        if all(tag in other and other[tag].session == checkpoint.session for other in others)
    }
    named = [read_latest(folder) for folder in folders]
    damaged: tuple[str, ...] = ()
    while (point := _point(folders, common, named)).tag is not None:
        found = [f"{folder / point.tag}: {lack}" for folder in folders if (lack := damaged_shard(folder / point.tag))]
        if not found:
            break
        damaged += tuple(found)
        del common[point.tag]
    # The same checkpoint may have been named as the one in `latest`.
    passed_over = (
        reason
        for reason in point.passed_over
        if not any(one.startswith(f"{reason.split(',')[0]}:") for one in damaged)
    )
    return ResumePoint(tag=point.tag, passed_over=(*damaged, *passed_over))


def _point(folders: Sequence[Path], common: Mapping[str, Checkpoint], named: Sequence[str | None]) -> ResumePoint:
    """Return the checkpoint of the common ones from which a run resumes, given what each folder's `latest` names."""
    first = named[0]
    if first in common and all(tag == first for tag in named):
        return ResumePoint(tag=first)
    newest = max(common.values(), key=lambda checkpoint: (checkpoint.step, checkpoint.is_best), default=None)
    if all(tag is None for tag in named) and not any(tags(folder) for folder in folders):
        return ResumePoint(tag=None)
    chosen = None if newest is None else newest.tag
    reasons = [_not_followed(folder, tag, chosen=chosen) for folder, tag in zip(folders, named, strict=True)]
    return ResumePoint(tag=chosen, passed_over=tuple(reason for reason in reasons if reason))


def _not_followed(folder: Path, tag: str | None, *, chosen: str | None) -> str | None:
    """Return why a run does not resume from the checkpoint that `latest` names; None if it does."""
    if tag is None:
        return f"{folder / LATEST} is missing"
    if not tag:
        return f"{folder / LATEST} is empty"
    if not is_tag(tag):
        return f"{folder / LATEST} names {tag!r}, which is no checkpoint"
    lack = defect(folder, tag)
    if lack is not None:
        return f"{folder / tag}: {lack}"
    return None if tag == chosen else f"{folder / tag}, which is not there for every model"
