"""Exports responses in the formats of VLMEvalKit (predictions) and lmms-eval (samples)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from lmm_r1.data.files import read_records
from lmm_r1.errors import UserError
from lmm_r1.evaluation.board import CheckpointResponses, MeasuredFile
from lmm_r1.evaluation.predictions import (
    CATEGORIES,
    LETTERS,
    SAMPLES_SUFFIX,
    Record,
    lmms_eval_sample,
    shown,
    write_table,
)
from lmm_r1.files.atomic import check_creatable, write_atomically
from lmm_r1.files.json_files import append_json_lines
from lmm_r1.records.responses import JudgedResponse, by_row

EXPORT_SUFFIXES = (".xlsx", ".tsv", ".json", SAMPLES_SUFFIX)
PLACEHOLDERS = ("checkpoint", "file")
KEPT = ("hint", *LETTERS, *CATEGORIES)
"""Columns of the rows' own file that go into the export if they exist, in this order."""
Columns = Mapping[int, Mapping[str, object]]
_OPTION_LISTS = ("choices", "options")


def check_exports(
    templates: Sequence[str], *, checkpoints: Sequence[str], files: Mapping[str, int], taken: Iterable[str | Path] = ()
) -> None:
    """Raise UserError, before anything is measured, for an unsupported format or a name that several exports would have."""
    used = {Path(path).resolve() for path in taken}
    for template in templates:
        suffix = Path(template).suffix
        if suffix not in EXPORT_SUFFIXES:
            raise UserError(
                f"--export {template}: the name must end in .xlsx, .tsv or .json (VLMEvalKit) or .jsonl (lmms-eval)"
            )
        for what, names in (("checkpoint", list(checkpoints)), ("file", list(files))):
            if len(names) > 1 and f"{{{what}}}" not in template:
                raise UserError(f"--export {template}: there are {len(names)} {what}s; put {{{what}}} into the name")
        for name, samples in files.items():
            if samples > 1 and suffix != SAMPLES_SUFFIX:
                raise UserError(
                    f"--export {template}: VLMEvalKit has one prediction per row, and {name} has {samples} samples; "
                    "use --n_samples 1, or export .jsonl (lmms-eval)"
                )
        for checkpoint in checkpoints:
            for file in files:
                path = export_path(template, checkpoint=checkpoint, file=file)
                check_creatable(path, flag="--export")
                if path.resolve() in used:
                    raise UserError(
                        f"--export {path}: the command already reads or writes this file; choose another name"
                    )
                used.add(path.resolve())
                if path.is_dir():
                    raise UserError(f"--export {path} is a folder; name a file")


def write_exports(
    templates: Sequence[str],
    *,
    checkpoints: Sequence[CheckpointResponses],
    files: Sequence[MeasuredFile],
    columns: Mapping[str, Columns],
) -> list[Path]:
    """Write every checkpoint's responses to every file and return the paths."""
    written = []
    for file in files:
        for checkpoint in checkpoints:
            responses = checkpoint.files.get(file.name)
            if not responses:
                continue
            for template in templates:
                path = export_path(template, checkpoint=checkpoint.name, file=file.name)
                if path.suffix == SAMPLES_SUFFIX:
                    _write_samples(path, responses, file=file, columns=columns[file.name])
                else:
                    write_table(path, prediction_rows(responses, columns=columns[file.name]))
                written.append(path)
    return written


def export_path(template: str, *, checkpoint: str, file: str) -> Path:
    """Return the name with its placeholders filled; characters outside of file names become underscores."""
    for what, value in zip(PLACEHOLDERS, (checkpoint, file), strict=True):
        template = template.replace(f"{{{what}}}", re.sub(r"[^\w.+-]+", "_", value))
    return Path(template)


def source_columns(
    file: MeasuredFile, *, checkpoints: Sequence[CheckpointResponses], report: Callable[[str], None]
) -> Columns:
    """Return `index`, `question` and the columns of `KEPT` of the rows' own file, by row index.

    Empty, with the reason given to `report`, if that file is missing or holds other rows than those that were answered.
    """
    if not Path(file.source).exists():
        report(f"{file.name}: {file.source} is not a file here, so the export has no columns from the rows' own file")
        return {}
    try:
        columns = {place: _kept(record) for place, (record, _, _) in enumerate(read_records(file.source))}
    except UserError as error:
        report(f"{file.name}: the export has no columns from the rows' own file: {error}")
        return {}
    for one in (one for checkpoint in checkpoints for one in checkpoint.files.get(file.name, ())):
        question = shown(columns.get(one.index, {}).get("question"))
        if question.strip() not in one.question:
            report(
                f"{file.name}: the export has no columns from the rows' own file, because {file.source} has another "
                f"question at {one.row}"
            )
            return {}
    return columns


def _kept(record: Mapping[str, object]) -> dict[str, object]:
    kept = {name: record[name] for name in ("index", "question", *KEPT) if shown(record.get(name))}
    listed = next((record[name] for name in _OPTION_LISTS if isinstance(record.get(name), list)), None)
    if "A" not in kept and isinstance(listed, list):
        kept |= dict(zip(LETTERS, map(shown, listed), strict=False))
    return kept


def prediction_rows(responses: Sequence[JudgedResponse], *, columns: Columns) -> list[dict[str, object]]:
    """Return the rows of a VLMEvalKit file: index, question, known options and categories, prediction."""
    rows = []
    own = {one.index: columns.get(one.index, {}) for one in responses}
    names = [name for name in KEPT if any(name in found for found in own.values())]
    keys = _indices(own)
    for one in responses:
        found = own[one.index]
        rows.append(
            {
                "index": keys[one.index],
                "question": shown(found.get("question")) or one.question,
                **{name: shown(found.get(name)) for name in names if name not in CATEGORIES},
                "answer": one.label,
                **{name: shown(found.get(name)) for name in names if name in CATEGORIES},
                "prediction": one.response,
            }
        )
    return rows


def _indices(own: Mapping[int, Mapping[str, object]]) -> dict[int, object]:
    """Return the index of each row in its own file; the row numbers if an index is missing or occurs twice."""
    given = {place: _whole(found.get("index")) for place, found in own.items()}
    if None in given.values() or len(set(given.values())) < len(given):
        return {place: place for place in own}
    return dict(given)


def _whole(value: object) -> object:
    text = shown(value)
    return int(text) if text.isdecimal() else text or None


def _write_samples(path: Path, responses: Sequence[JudgedResponse], *, file: MeasuredFile, columns: Columns) -> None:
    samples = [_sample(row, file=file, columns=columns) for row in by_row(responses)]
    # An earlier file is removed only now, when there is something to replace it.
    write_atomically(path, text="")
    try:
        append_json_lines(path, samples, readable=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error


def _sample(row: Sequence[JudgedResponse], *, file: MeasuredFile, columns: Columns) -> Record:
    first = row[0]
    known = {name: shown(value) for name, value in columns.get(first.index, {}).items()}
    doc = {"question": first.question, "answer": first.label, **known}
    score = fmean(one.verdicts[file.verifier].score for one in row)
    return lmms_eval_sample(
        doc_id=first.index,
        doc=doc,
        prompt=first.question,
        target=first.label,
        settings=file.sampling,
        responses=[one.response for one in row],
        metrics={f"{re.sub(r'[^a-z0-9]+', '_', file.verifier.lower())}_score": score},
    )
