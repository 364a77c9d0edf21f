"""lmms-eval's samples: one JSON object per `doc_id`, of this release (without `doc`) and of earlier ones (with it)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lmm_r1.evaluation.harness.predictions import (
    PredictedRow,
    Predictions,
    Record,
    find_metric,
    good_rows,
    shown,
    verdict,
)

# What a sample says beside its metrics, over the releases.
FIELDS = frozenset(
    (
        *("doc_id", "doc", "target", "arguments", "input", "input_media", "resps", "filtered_resps", "filter"),
        *("doc_hash", "prompt_hash", "target_hash", "token_counts", "metrics"),
    )
)
_LIKELIHOOD = re.compile(r"-?(?:\d+\.\d+(?:e[+-]?\d+)?|inf)")
_DATE = re.compile(r"^\d[\d_\-T:.]*_samples_|^samples_")


def is_lmms_eval(record: Record) -> bool:
    """Return whether a record is such a sample."""
    return "doc_id" in record and ("filtered_resps" in record or "resps" in record)


def lmms_eval_predictions(path: Path, records: Sequence[Record], *, metric: str | None) -> Predictions:
    """Return the rows of a file of samples.

    Rows without a target, and those that compare likelihoods and hold no response, are left out.

    Raises:
        UserError: `metric` holds no verdicts, or the file has several and none was chosen.
    """
    names = list(dict.fromkeys(name for record in records for name in _numbers(record)))
    found, notes = find_metric(records, path=path, wanted=metric, names=names, sole=True)
    rows, skipped = good_rows(_parsed(path, records, metric=found))
    return Predictions(path=path, harness="lmms-eval", metric=found, rows=rows, skipped=skipped, notes=tuple(notes))


def _numbers(record: Record, prefix: str = "") -> Iterator[str]:
    """The dotted names of what may be verdicts: numbers and truths outside of the known fields."""
    for name, value in record.items():
        if isinstance(value, bool | int | float) and (prefix or name not in FIELDS):
            yield f"{prefix}{name}"
        elif isinstance(value, dict) and not prefix and name not in FIELDS:
            # Of an object only what is surely a verdict: it often holds ids and numbers of the question, too.
            yield from (f"{name}.{inner}" for inner, said in value.items() if isinstance(said, bool))


def _parsed(path: Path, records: Sequence[Record], *, metric: str | None) -> Iterator[tuple[int, PredictedRow | str]]:
    task = _DATE.sub("", path.stem)
    for place, record in enumerate(records):
        location = f"{path} line {place + 1}"
        label = shown(record.get("target")).strip()
        responses = _responses(record.get("filtered_resps", record.get("resps")))
        if not label:
            yield place, f"{location}: the target is empty, so there is nothing to judge by"
        elif responses is None:
            yield place, f"{location}: the sample holds likelihoods and no response, so there is nothing to judge"
        else:
            yield place, PredictedRow(
                key=shown(record.get("doc_id")),
                location=location,
                question=_question(record),
                label=label,
                responses=responses,
                theirs=None if metric is None else verdict(record, metric),
                datasource=task,
                images=_images(record),
            )


def _responses(value: object) -> tuple[str, ...] | None:
    """The texts in `"text"`, `["text", ...]` or `[["text", ...], ...]`; None for pairs of a likelihood and a truth."""
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


def _images(record: Record) -> tuple[str, ...]:
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
    """Return one sample with the fields of every release; the responses are one request each."""
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
