"""An evaluation as the JSON that `records.evaluation.read_evaluation` and the report read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lmm_r1.evaluation.scoreboard.board import Board, Cell, MeasuredFile
from lmm_r1.evaluation.scores import SampleScores


def board_record(board: Board) -> dict[str, Any]:
    """Return an evaluation as plain values: settings, files, checkpoints with their scores per file, comparisons."""
    return {
        "settings": dict(board.settings),
        "files": {file.name: _file(file) for file in board.files},
        "checkpoints": [
            {
                "name": checkpoint.name,
                "path": checkpoint.path,
                "files": {
                    file.name: _cell(board.cells[checkpoint.name, file.name], file=file)
                    for file in board.files
                    if (checkpoint.name, file.name) in board.cells
                },
            }
            for checkpoint in board.checkpoints
        ],
        "baseline": board.baseline,
        "comparisons": [asdict(comparison) for comparison in board.comparisons],
    }


def _file(file: MeasuredFile) -> dict[str, Any]:
    return {
        "source": file.source,
        "verifiers": list(file.verifiers),
        "k": list(file.ks),
        **file.sampling,
        "skipped_rows": [asdict(row) for row in file.skipped],
    }


def _cell(cell: Cell, *, file: MeasuredFile) -> dict[str, Any]:
    sources = {name: _scores(scores, verifier=file.verifier) for name, scores in cell.datasources.items()}
    seconds = {} if cell.seconds is None else {"seconds": cell.seconds}
    return {**_scores(cell.all, verifier=file.verifier), **seconds, "datasources": sources}


def _scores(scores: SampleScores, *, verifier: str) -> dict[str, Any]:
    """The accuracy of the file's own verifier beside the scores of all of them."""
    accuracy = scores.verifiers[verifier].accuracy
    return {"accuracy": accuracy.mean, "accuracy_standard_error": accuracy.standard_error, **asdict(scores)}
