"""VLMEvalKit's files of predictions: one row per `index`, with a `prediction`, and a verdict once it was evaluated."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.evaluation.harness.predictions import (
    FAILED_REQUEST,
    PredictedRow,
    Predictions,
    Record,
    find_metric,
    good_rows,
    shown,
    verdict,
)

LETTERS = string.ascii_uppercase
METRICS = ("hit", "score", "correct")
"""Columns that an evaluation adds, the likeliest first."""
CATEGORIES = ("category", "l2-category", "split")


def is_vlmevalkit(record: Record) -> bool:
    """Return whether a record is a row of such a file."""
    return "prediction" in record and "doc_id" not in record


def vlmevalkit_predictions(path: Path, records: Sequence[Record], *, metric: str | None) -> Predictions:
    """Return the rows of a file of predictions, or of what an evaluation made of it.

    Rows without an answer, and those whose request failed, are left out.

    Raises:
        UserError: a column is missing, or `metric` holds no verdicts.
    """
    for name in ("answer", "prediction"):
        if not any(name in record for record in records):
            raise UserError(
                f"{path}: no column {name!r} (found: {', '.join(records[0])}); is it a file of predictions?"
            )
    names = [name for name in METRICS if any(name in record for record in records)]
    found, notes = find_metric(records, path=path, wanted=metric, names=names, sole=False)
    rows, skipped = good_rows(_parsed(path, records, metric=found))
    return Predictions(path=path, harness="VLMEvalKit", metric=found, rows=rows, skipped=skipped, notes=tuple(notes))


def _parsed(path: Path, records: Sequence[Record], *, metric: str | None) -> Iterator[tuple[int, PredictedRow | str]]:
    for place, record in enumerate(records):
        location = f"{path} row {place + 1}"
        label, prediction = shown(record.get("answer")).strip(), shown(record.get("prediction"))
        if not label:
            yield place, f"{location}: the answer is empty, so there is nothing to judge by"
        elif prediction.startswith(FAILED_REQUEST):
            yield place, f"{location}: the prediction is VLMEvalKit's note of a failed request; predict the row again"
        else:
            yield place, PredictedRow(
                key=shown(record.get("index")) or str(place),
                location=location,
                question=shown(record.get("question")),
                label=label,
                responses=(prediction,),
                theirs=None if metric is None else verdict(record, metric),
                datasource=next((text for name in CATEGORIES if (text := shown(record.get(name)))), path.stem),
                options={letter: text for letter in LETTERS if (text := shown(record.get(letter)))},
                images=_images(record),
            )


def _images(record: Record) -> tuple[str, ...]:
    """The image that the file itself holds, if it does: VLMEvalKit leaves the column out of predictions."""
    image = record.get("image")
    return (image,) if isinstance(image, str) and image else ()
