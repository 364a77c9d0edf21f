"""Where a run goes on: the step that all of its models have whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmm_r1.checkpoints.folder import LATEST, Checkpoint, defect, is_tag, read_latest, tags, whole_checkpoints
from lmm_r1.checkpoints.writing import finish_interrupted


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    tag: str | None
    """None where no checkpoint is whole in every folder."""
    passed_over: tuple[str, ...] = ()
    """What should have been taken and could not be, and why."""


def resume_point(folders: Sequence[Path]) -> ResumePoint:
    """Return the checkpoint that a run goes on from: one tag for all of its models, whole in each one's folder.

    It is what `latest` names, where that is the same everywhere and whole; else the newest that all folders have. A
    save that was killed between its marker and its rename is brought to its end.
    """
    for folder in folders:
        finish_interrupted(folder)
    common, named = _common(folders), [read_latest(folder) for folder in folders]
    first = named[0]
    if first in common and all(tag == first for tag in named):
        return ResumePoint(tag=first)
    newest = max(common.values(), key=lambda checkpoint: (checkpoint.step, checkpoint.is_best), default=None)
    if all(tag is None for tag in named) and not any(tags(folder) for folder in folders):
        return ResumePoint(tag=None)
    chosen = None if newest is None else newest.tag
    reasons = [_not_followed(folder, tag, chosen=chosen) for folder, tag in zip(folders, named, strict=True)]
    reasons += [
        f"{folder / tag} has no counterpart in {other.name}"
        for folder in folders
        for tag, checkpoint in whole_checkpoints(folder).items()
        for other in folders
        if tag not in common and checkpoint.step > (-1 if newest is None else newest.step)
        if other != folder and defect(other, tag) is not None
    ]
    return ResumePoint(tag=chosen, passed_over=tuple(reason for reason in reasons if reason))


def _common(folders: Sequence[Path]) -> dict[str, Checkpoint]:
    """Return the checkpoints that every folder has whole, and that were saved together."""
    first, *others = [whole_checkpoints(folder) for folder in folders]
    return {
        tag: checkpoint
        for tag, checkpoint in first.items()
        if all(tag in other and other[tag].session == checkpoint.session for other in others)
    }


def _not_followed(folder: Path, tag: str | None, *, chosen: str | None) -> str | None:
    """Say why a run does not go on from what `latest` names."""
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
