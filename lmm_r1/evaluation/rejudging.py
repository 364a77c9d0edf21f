"""Predictions of other harnesses, judged by our verifiers and compared with the verdicts in their files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean

from lmm_r1.config.evaluate import EvaluateConfig
from lmm_r1.data.files import read_records, read_row_file
from lmm_r1.data.messages import ImageSource, Message, Row, TextPart, images_of, resolve
from lmm_r1.data.reading import SkippedRow
from lmm_r1.data.recipes.recipe import LETTERS, SuiteSampling
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.evaluation.board import Agreement, CheckpointResponses, Disagreement, MeasuredFile, Rejudged, compare_rows
from lmm_r1.evaluation.page_parts import image_uri
from lmm_r1.evaluation.predictions import PredictedRow, Predictions, read_predictions, shown
from lmm_r1.evaluation.rows import DEFAULT_VERIFIER, RowSet, judge_responses, question_of
from lmm_r1.evaluation.scores import powers_of_two
from lmm_r1.records.responses import JudgedResponse, by_row
from lmm_r1.scoring.response_scores import VerifierJudge


class PredictionImages:
    """The images of predicted rows, each read when it is needed."""

    def __init__(self, data: str | None, *, predictions: Predictions) -> None:
        """Args:
        data: a row file whose `index`, or else row number, matches the keys of the predictions; None for none.
        """
        self.notes: list[str] = []
        """The images that are missing, in sentences."""
        self._path = predictions.path
        self._data = data
        self._rows = {} if data is None else _rows_by_key(data)

    def of(self, index: int, row: PredictedRow) -> tuple[str, ...]:
        """Return the row's images as small data URIs; missing ones are reported in `notes`."""
        try:
            if row.images:
                sources = [resolve(source, base_dir=self._path.parent) for source in row.images]
            else:
                sources = list(self._found(row))
            return tuple(image_uri(source, location=row.location) for source in sources)
        except UserError as error:
            self.notes.append(f"without its image: {error}")
            return ()

    def _found(self, row: PredictedRow) -> Iterator[ImageSource]:
        if self._data is None:
            return
        found = self._rows.get(row.key)
        if found is None:
            raise UserError(f"{row.location}: {self._data} has no row {row.key}")
        if isinstance(found, SkippedRow):
            raise UserError(found.reason)
        _check_same(question_of(found), row, location=found.location)
        yield from (part.source for part in images_of(found.messages))


def _rows_by_key(path: str) -> dict[str, Row | SkippedRow]:
    """Return the rows of a file in any format, by the keys that predictions have for them."""
    file = read_row_file(path, answer_required=False, bad_rows="skip")
    found: dict[int, Row | SkippedRow] = {**file.rows, **{row.index: row for row in file.skipped}}
    return {
        shown(columns.get("index")) or str(place): found[place]
        for place, (columns, _, _) in enumerate(read_records(path))
    }


def _check_same(question: str, row: PredictedRow, *, location: str) -> None:
    """Raise UserError if the row file has another question for the row, because its image would mislead."""
    theirs, ours = " ".join(row.question.split()), " ".join(question.split())
    if theirs and ours and theirs not in ours and ours not in theirs:
        raise UserError(f"{row.location}: {location} has another question")


CHECKPOINT = "predictions"
"""The name of the checkpoint, which a file of predictions does not state."""
# Scores in tables are rounded; exact fractions of them would have too many denominators for the exact test.
MAX_DENOMINATOR = 1000


@dataclass(frozen=True, kw_only=True)
class RejudgedFiles:
    """The result of re-judging."""

    checkpoint: CheckpointResponses
    files: tuple[MeasuredFile, ...]
    rejudged: tuple[Rejudged, ...]
    """Only files that have verdicts of their own."""
    columns: Mapping[str, dict[int, dict[str, object]]]
    """The columns of each file's rows for an export."""


def rejudge(
    config: EvaluateConfig, files: Mapping[str, str], data: Mapping[str, str], *, report: Callable[[str], None]
) -> RejudgedFiles:
    """Return our verifiers' verdicts on files of predictions, and where they differ from the files' own."""
    for name in data:
        if name not in files:
            raise UserError(
                f"--rejudge_data {name}={data[name]}: there is no --rejudge {name}=PATH; it has {', '.join(files)}"
            )
    found = {
        name: read_predictions(Path(path), metric=config.rejudge_metric, max_rows=config.max_rows)
        for name, path in files.items()
    }
    images = {name: PredictionImages(data.get(name), predictions=found[name]) for name in found}
    sets = {name: _row_set(config, name, predictions) for name, predictions in found.items()}
    judges = {
        verifier: VerifierJudge(verifier, workers=config.judge_workers, item_timeout_seconds=config.judge_timeout)
        for verifier in dict.fromkeys(verifier for row_set in sets.values() for verifier in row_set.file.verifiers)
    }
    responses: dict[str, list[JudgedResponse]] = {}
    measured, rejudged = [], []
    with contextlib.ExitStack() as stack:
        sets = {name: _gradable(row_set, judges) for name, row_set in sets.items()}
        running = {verifier: stack.enter_context(judge) for verifier, judge in judges.items()}
        for name, row_set in sets.items():
            completions = {index: _completions(found[name].rows[index]) for index in row_set.rows}
            responses[name] = judge_responses(completions, checkpoint=CHECKPOINT, row_set=row_set, judges=running)
    for name, row_set in sets.items():
        measured.append(row_set.file)
        for note in found[name].notes:
            report(note)
        compared = _compared(config, name, found[name], responses[name], row_set.file.verifiers, images[name])
        if compared is None:
            report(f"{files[name]} has no verdicts of its own, so there is nothing to compare ours with")
        else:
            rejudged.append(compared)
        for note in images[name].notes:
            report(note)
    return RejudgedFiles(
        checkpoint=CheckpointResponses(name=CHECKPOINT, path=" ".join(files.values()), files=responses),
        files=tuple(measured),
        rejudged=tuple(rejudged),
        columns={name: {index: _columns(row) for index, row in found[name].rows.items()} for name in found},
    )


def _row_set(config: EvaluateConfig, name: str, predictions: Predictions) -> RowSet:
    rows = predictions.rows
    fewest = min(len(row.responses) for row in rows.values())
    too_many = [k for k in config.k if not 1 <= k <= fewest]
    if too_many:
        raise UserError(f"--k {too_many[0]}: {name} has rows with {fewest} responses, so k must be from 1 to {fewest}")
    lettered = all(row.label in tuple(LETTERS) for row in rows.values())
    file = MeasuredFile(
        name=name,
        source=str(predictions.path),
        verifiers=config.reward or ("choice" if lettered else DEFAULT_VERIFIER,),
        ks=tuple(sorted(set(config.k))) or tuple(powers_of_two(fewest)),
        skipped=predictions.skipped,
    )
    return RowSet(file=file, rows={index: _row(row) for index, row in rows.items()}, sampling=SuiteSampling())


def _row(row: PredictedRow) -> Row:
    return Row(
        messages=(Message(role="user", parts=(TextPart(row.question),)),),
        answer=row.label,
        datasource=row.datasource,
        location=row.location,
    )


def _completions(row: PredictedRow) -> list[Completion]:
    return [Completion(text=text, num_tokens=None, finish_reason="unknown") for text in row.responses]


def _columns(row: PredictedRow) -> dict[str, object]:
    return {"index": row.key, "question": row.question, **row.options}


def _gradable(row_set: RowSet, judges: Mapping[str, VerifierJudge]) -> RowSet:
    """Return the rows whose labels every verifier accepts; the others are left out."""
    rows: dict[int, Row] = {}
    refused: list[SkippedRow] = []
    for index, row in row_set.rows.items():
        try:
            for verifier in row_set.file.verifiers:
                judges[verifier].check_labels([row])
            rows[index] = row
        except UserError as error:
            refused.append(SkippedRow(index=index, reason=str(error)))
    if not rows:
        raise UserError(
            f"{row_set.file.source}: none of its {len(refused)} rows can be judged; the first: {refused[0].reason}"
        )
    skipped = sorted([*row_set.file.skipped, *refused], key=lambda row: row.index)
    return replace(row_set, rows=rows, file=replace(row_set.file, skipped=tuple(skipped)))


def _compared(
    config: EvaluateConfig,
    name: str,
    predictions: Predictions,
    responses: Sequence[JudgedResponse],
    verifiers: Sequence[str],
    images: PredictionImages,
) -> Rejudged | None:
    if predictions.metric is None:
        return None
    theirs = {row[0].index: predictions.rows[row[0].index].theirs for row in by_row(responses)}
    known = {
        index: Fraction(value).limit_denominator(MAX_DENOMINATOR)
        for index, value in theirs.items()
        if value is not None
    }
    if not known:
        return None
    agreements, listed = [], []
    for verifier in verifiers:
        ours = {
            row[0].index: Fraction(sum(one.verdicts[verifier].right for one in row), len(row))
            for row in by_row(responses)
        }
        comparison = compare_rows(
            known,
            ours,
            baseline=predictions.metric,
            checkpoint=verifier,
            file=name,
            verifier=verifier,
            resamples=config.bootstrap_resamples,
            seed=config.bootstrap_seed,
        )
        agreements.append(
            Agreement(
                comparison=comparison,
                theirs=fmean(map(float, known.values())),
                ours=fmean(float(ours[index]) for index in known),
            )
        )
        if verifier == verifiers[0]:
            listed = [
                _disagreement(name, verifier, index, predictions.rows[index], ours=float(ours[index]), images=images)
                for index in known
                if ours[index] != known[index]
            ]
    return Rejudged(
        file=name,
        harness=predictions.harness,
        metric=predictions.metric,
        agreements=tuple(agreements),
        disagreements=tuple(listed),
    )


def _disagreement(
    name: str, verifier: str, index: int, row: PredictedRow, *, ours: float, images: PredictionImages
) -> Disagreement:
    assert row.theirs is not None, "only rows with a verdict are compared"
    return Disagreement(
        file=name,
        verifier=verifier,
        row=row.location,
        key=row.key,
        question=row.question,
        options=row.options,
        label=row.label,
        predictions=row.responses,
        theirs=row.theirs,
        ours=ours,
        images=images.of(index, row),
    )
