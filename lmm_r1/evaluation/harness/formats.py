"""Reads the result files of evaluation harnesses: lmms-eval and VLMEvalKit."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.evaluation.harness.predictions import (
    FAILED_REQUEST,
    TABLE_SUFFIXES,
    PredictedRow,
    Predictions,
    Record,
    find_metric,
    good_rows,
    read_table,
    shown,
    verdict,
)
from lmm_r1.files.json_files import read_json_lines

# The fields of a sample other than its metrics, in all releases.
FIELDS = frozenset(
    (
        *("doc_id", "doc", "target", "arguments", "input", "input_media", "resps", "filtered_resps", "filter"),
        *("doc_hash", "prompt_hash", "target_hash", "token_counts", "metrics"),
    )
)
_LIKELIHOOD = re.compile(r"-?(?:\d+\.\d+(?:e[+-]?\d+)?|inf)")
_DATE = re.compile(r"^\d[\d_\-T:.]*_samples_|^samples_")


def is_lmms_eval(record: Record) -> bool:
    """Return whether a record is a sample of lmms-eval."""
    return "doc_id" in record and ("filtered_resps" in record or "resps" in record)


def lmms_eval_predictions(path: Path, records: Sequence[Record], *, metric: str | None) -> Predictions:
    """Return the rows of a file of samples.

    Rows without a target, and rows that compare likelihoods without a response, are left out.

    Raises:
        UserError: `metric` holds no verdicts, or the file has several and none was chosen.
    """
    names = list(dict.fromkeys(name for record in records for name in _numbers(record)))
    found, notes = find_metric(records, path=path, wanted=metric, names=names, sole=True)
    rows, skipped = good_rows(_lmms_eval_rows(path, records, metric=found))
    return Predictions(path=path, harness="lmms-eval", metric=found, rows=rows, skipped=skipped, notes=tuple(notes))


def _numbers(record: Record, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of possible verdicts: numbers and booleans outside of the known fields."""
    for name, value in record.items():
        if isinstance(value, bool | int | float) and (prefix or name not in FIELDS):
            yield f"{prefix}{name}"
        elif isinstance(value, dict) and not prefix and name not in FIELDS:
            # Inside an object only booleans count: it often holds ids and numbers of the question, too.
            yield from (f"{name}.{inner}" for inner, said in value.items() if isinstance(said, bool))


def _lmms_eval_rows(
    path: Path, records: Sequence[Record], *, metric: str | None
) -> Iterator[tuple[int, PredictedRow | str]]:
    task = _DATE.sub("", path.stem)
    for place, record in enumerate(records):
        location = f"{path} line {place + 1}"
        label = shown(record.get("target")).strip()
        responses = _responses(record.get("filtered_resps", record.get("resps")))
        if not label:
            yield place, f"{location}: the target is empty, so there is nothing to compare with"
        elif responses is None:
            yield place, f"{location}: the sample holds likelihoods but no response, so there is nothing to judge"
        else:
            yield place, PredictedRow(
                key=shown(record.get("doc_id")),
                location=location,
                question=_question(record),
                label=label,
                responses=responses,
                theirs=None if metric is None else verdict(record, metric),
                datasource=task,
                images=_lmms_eval_images(record),
            )


def _responses(value: object) -> tuple[str, ...] | None:
    """Return the texts of `"text"`, `["text", ...]` or `[["text", ...], ...]`; None for (likelihood, bool) pairs."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        return None
    texts: list[str] = []
    for item in value:
        inner = item if isinstance(item, list) else [item]
        if len(inner) == 2 and _LIKELIHOOD.fullmatch(str(inner[0])) and str(inner[1]) in ("True", "False"):
            return None
        if not all(isinstance(text, str) for text in inner):
            return None
        texts += inner
    return tuple(texts)


def _question(record: Record) -> str:
    if isinstance(record.get("input"), str):
        return str(record["input"])
    arguments = record.get("arguments")
    # [[prompt, settings, ...]], or {"gen_args_0": {"arg_0": prompt}}.
    while isinstance(arguments, list | dict) and arguments:
        arguments = arguments[0] if isinstance(arguments, list) else next(iter(arguments.values()))
    if isinstance(arguments, str):
        return arguments
    doc = record.get("doc")
    return shown(doc.get("question")) if isinstance(doc, dict) else ""


def _lmms_eval_images(record: Record) -> tuple[str, ...]:
    media = record.get("input_media")
    return tuple(item for item in media if isinstance(item, str)) if isinstance(media, list) else ()


def lmms_eval_sample(
    *,
    doc_id: int,
    doc: Mapping[str, object],
    prompt: str,
    target: str,
    settings: Mapping[str, object],
    responses: Sequence[str],
    metrics: Mapping[str, float],
) -> Record:
    """Return one sample with the fields of all releases and one request per response."""
    return {
        "doc_id": doc_id,
        "doc": dict(doc),
        "target": target,
        "arguments": [[prompt, dict(settings)]],
        "input": prompt,
        "resps": [[response] for response in responses],
        "filtered_resps": list(responses),
        "doc_hash": _hash(json.dumps(dict(doc), indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(target),
        **metrics,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


LETTERS = string.ascii_uppercase
METRICS = ("hit", "score", "correct")
"""Columns that an evaluation adds, the most likely first."""
CATEGORIES = ("category", "l2-category", "split")


def is_vlmevalkit(record: Record) -> bool:
    """Return whether a record is a row of a VLMEvalKit file."""
    return "prediction" in record and "doc_id" not in record


def vlmevalkit_predictions(path: Path, records: Sequence[Record], *, metric: str | None) -> Predictions:
    """Return the rows of a file of predictions, or of the file that an evaluation made from it.

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
    rows, skipped = good_rows(_vlmevalkit_rows(path, records, metric=found))
    return Predictions(path=path, harness="VLMEvalKit", metric=found, rows=rows, skipped=skipped, notes=tuple(notes))


def _vlmevalkit_rows(
    path: Path, records: Sequence[Record], *, metric: str | None
) -> Iterator[tuple[int, PredictedRow | str]]:
    for place, record in enumerate(records):
        location = f"{path} row {place + 1}"
        label, prediction = shown(record.get("answer")).strip(), shown(record.get("prediction"))
        if not label:
            yield place, f"{location}: the answer is empty, so there is nothing to compare with"
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
                images=_vlmevalkit_images(record),
            )


def _vlmevalkit_images(record: Record) -> tuple[str, ...]:
    """Return the image if the file holds it; VLMEvalKit omits the column from predictions."""
    image = record.get("image")
    return (image,) if isinstance(image, str) and image else ()


SAMPLES_SUFFIX = ".jsonl"


def read_predictions(path: Path, *, metric: str | None = None, max_rows: int | None = None) -> Predictions:
    """Return the contents of a file of VLMEvalKit or lmms-eval.

    Args:
        metric: the field with the file's own verdicts; None detects it.
        max_rows: the number of rows to read; None reads all.

    Raises:
        UserError: the file is missing or of neither harness, or none of its rows can be judged.
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
        raise UserError(
            f"{path}: unknown kind of file; known kinds are {', '.join((*TABLE_SUFFIXES, SAMPLES_SUFFIX))}"
        )
    if not path.is_file():
        raise UserError(f"no file {path}; check the path")
    records = []
    for line in read_json_lines(path):
        if line.record is None:
            raise UserError(f"{line.place}: the line is incomplete; write the file again")
        records.append(line.record)
    if not records:
        raise UserError(f"{path} holds no rows; check the path")
    return records
