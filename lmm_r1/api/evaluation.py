"""Checkpoints measured on held-out rows, as `lmm-r1 evaluate` measures them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lmm_r1.api.process import own_process
from lmm_r1.api.settings import IMAGE_DIR, Rows, image_dir, read_config, row_file
from lmm_r1.config.evaluate import EvaluateConfig, page_path
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from lmm_r1.evaluation.scoreboard import Board

AnyPath: TypeAlias = "str | os.PathLike[str]"
ROWS = "rows"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured: `accuracy()` for the figure, `board` for all of them."""

    board: Board
    """Every score with its standard error, the responses, and the comparisons with the baseline."""
    output: Path | None
    """JSON with all scores, responses beside it; None where none was asked for."""
    page: Path | None
    """The same for people; None likewise."""

    def accuracy(self, checkpoint: str | None = None, file: str | None = None) -> float:
        """Return the share of right responses by the first verifier; of several checkpoints or files, of the first.

        Raises UserError for a name that was not measured.
        """
        names = [one.name for one in self.board.checkpoints]
        files = {one.name: one for one in self.board.files}
        checkpoint, file = checkpoint or names[0], file or next(iter(files))
        if (checkpoint, file) not in self.board.cells:
            raise UserError(
                f"{checkpoint} on {file} was not measured; there are {', '.join(names)} on {', '.join(files)}"
            )
        scores = self.board.cells[checkpoint, file].all
        return scores.verifiers[files[file].verifier].accuracy.mean


def evaluate(
    checkpoints: AnyPath | Sequence[AnyPath] | Mapping[str, AnyPath],
    rows: Rows | Mapping[str, Rows],
    *,
    verifier: str | Sequence[str] = (),
    output: AnyPath | None = None,
    **settings: object,
) -> Evaluation:
    """Measure checkpoints on rows, by one or more verifiers.

    Args:
        checkpoints: one, several, or several by names; of several the first is the baseline.
        rows: one set of rows, or several by names.
        verifier: as `verifiers` of `lmm-r1 evaluate` has it; by default `math`.
        output: the JSON file, with the responses and a page beside it; None keeps nothing.
        settings: others of `lmm-r1 evaluate --help`: `n_samples=4, temperature=0.6`.

    Raises:
        UserError: a setting, a checkpoint or all rows of a file cannot be used.
    """
    arguments = {"checkpoints": "checkpoints", "files": "rows", "verifiers": "verifier"}
    with own_process(arguments), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else Path(output).absolute().parent
        named = rows if isinstance(rows, Mapping) else {ROWS: rows}
        files = {name: row_file(own, folder=folder, argument=name) for name, own in named.items()}
        given: dict[str, object] = {
            "checkpoints": [f"{name}={os.fspath(path)}" for name, path in _named(checkpoints).items()],
            "files": [f"{name}={path}" for name, path in files.items()],
            "output": folder / "scores.json" if output is None else Path(output),
        }
        if verifier:
            given["verifiers"] = [verifier] if isinstance(verifier, str) else list(verifier)
        if settings.get(IMAGE_DIR) is None and all(map(image_dir, named.values())):
            given |= image_dir([])
        config = read_config(EvaluateConfig, settings, given)
        from lmm_r1.cli.evaluate import evaluate as run

        kept = output is not None
        board = run(config, told=kept)
        return Evaluation(
            board=board, output=config.output if kept else None, page=page_path(config) if kept else None
        )


def _named(checkpoints: AnyPath | Sequence[AnyPath] | Mapping[str, AnyPath]) -> Mapping[str, AnyPath]:
    if isinstance(checkpoints, Mapping):
        return checkpoints
    paths = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else list(checkpoints)
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    if len(set(names)) < len(names):
        # Folders of the same name are told apart by where they are.
        names = [os.fspath(path) for path in paths]
    return dict(zip(names, paths, strict=True))
