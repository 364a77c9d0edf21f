"""A file of predictions, of whichever harness: its records tell."""

from __future__ import annotations

import itertools
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.evaluation.harness.lmms_eval import is_lmms_eval, lmms_eval_predictions
from lmm_r1.evaluation.harness.predictions import Predictions, Record
from lmm_r1.evaluation.harness.tables import TABLE_SUFFIXES, read_table
from lmm_r1.evaluation.harness.vlmevalkit import is_vlmevalkit, vlmevalkit_predictions
from lmm_r1.files.json_files import read_json_lines

SAMPLES_SUFFIX = ".jsonl"


def read_predictions(path: Path, *, metric: str | None = None, max_rows: int | None = None) -> Predictions:
    """Return what a file of VLMEvalKit or lmms-eval holds.

    Args:
        metric: where its own verdicts stand; None looks for them.
        max_rows: from the start of the file; None takes all.

    Raises:
        UserError: it is missing or of neither harness, or none of its rows can be judged.
    """
    records = list(itertools.islice(_records(path), max_rows))
    if all(map(is_lmms_eval, records)):
        found = lmms_eval_predictions(path, records, metric=metric)
    elif any(map(is_vlmevalkit, records)):
        found = vlmevalkit_predictions(path, records, metric=metric)
    else:
        raise UserError(
            f"{path} holds no predictions: VLMEvalKit's have a column prediction, lmms-eval's a doc_id and "
            f"filtered_resps (found: {', '.join(records[0]) or 'nothing'}); with lmms-eval, add --log_samples"
        )
    if not found.rows:
        raise UserError(
            f"{path}: none of its {len(found.skipped)} rows can be judged; the first: {found.skipped[0].reason}"
        )
    return found


def _records(path: Path) -> list[Record]:
    if path.suffix in TABLE_SUFFIXES:
        return read_table(path)
    if path.suffix != SAMPLES_SUFFIX:
        raise UserError(f"{path}: unknown kind of file; known are {', '.join((*TABLE_SUFFIXES, SAMPLES_SUFFIX))}")
    if not path.is_file():
        raise UserError(f"no file {path}; check the path")
    records = []
    for line in read_json_lines(path):
        if line.record is None:
            raise UserError(f"{line.place}: the line is cut short; write the file again")
        records.append(line.record)
    if not records:
        raise UserError(f"{path} holds no rows; check the path")
    return records
