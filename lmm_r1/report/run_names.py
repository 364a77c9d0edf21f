"""Names by which the runs of one page can be told apart."""

from collections.abc import Sequence
from pathlib import Path

from lmm_r1.errors import UserError


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return each folder's name, with as many of the folders above it as it takes to tell it from the others.

    `runs/a/demo`, `runs/b/demo` and `runs/c` become `a/demo`, `b/demo` and `c`; the same folder twice is a UserError.
    """
    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(resolved):
        if folder in resolved[:index]:
            raise UserError(f"{folders[index]}: this run is given twice; leave one of them out")
    return [_name(folder, others=[other for other in resolved if other != folder]) for folder in resolved]


def _name(folder: Path, *, others: Sequence[Path]) -> str:
    depths = range(1, len(folder.parts))
    return next((name for depth in depths if (name := _tail(folder, depth)) not in _tails(others, depth)), str(folder))


def _tails(folders: Sequence[Path], depth: int) -> set[str]:
    return {_tail(folder, depth) for folder in folders}


def _tail(folder: Path, depth: int) -> str:
    return "/".join(folder.parts[1:][-depth:])
