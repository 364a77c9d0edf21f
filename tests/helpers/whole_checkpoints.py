"""Which steps a run could go on from, for tests that look between two sessions and change nothing."""

from collections.abc import Sequence
from pathlib import Path

from lmm_r1.host.checkpoint_folder import whole_checkpoints


def complete_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoint is whole, the newest last."""
    return sorted({checkpoint.step for checkpoint in whole_checkpoints(folder).values()})


def newest_common_step(folders: Sequence[Path]) -> int | None:
    """Return the newest step that every folder has whole and from the same session, None where there is none."""
    found = [
        {(entry.step, entry.tag, entry.session) for entry in whole_checkpoints(folder).values()} for folder in folders
    ]
    return max((step for step, *_ in set.intersection(*found)), default=None)
