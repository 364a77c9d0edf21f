"""The responses of a checkpoint to files of rows, from an engine, and what verifiers say of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.messages import Row, TextPart, images_of
from lmm_r1.data.picture_files import PictureFolder
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.evaluation.episodes import environment_scores, episode_of
from lmm_r1.evaluation.row_set import RowSet
from lmm_r1.generation.engine import Responder, SamplingSettings
from lmm_r1.records.responses import JudgedResponse, Verdict
from lmm_r1.scoring.response_scores import Judge
from remote_rm.verifier import Item

# Rows between two lines about how far an engine is.
REPORTED_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class AnsweredRows:
    """What a checkpoint made of the rows of one file."""

    completions: dict[int, tuple[Completion, ...]]
    """By the row's place in the file, in that order; rows that it could not take are not there."""
    skipped: tuple[SkippedRow, ...]
    seconds: float


def answer_files(
    make: Callable[[], Responder],
    *,
    model: str,
    files: Mapping[str, Mapping[int, Row]],
    sampling: Mapping[str, SamplingSettings],
    report: Callable[[str], None],
    pictures: PictureFolder | None = None,
) -> dict[str, AnsweredRows]:
    """Return what a model answers to the rows of each file; `report` gets a line now and then.

    Raises UserError where the engine cannot be had, and where it can take none of a file's rows.

    Args:
        make: gives the model's engine.
        model: as the lines name it.
        pictures: where those go that episodes have shown.
    """
    with contextlib.closing(make()) as engine:
        return {
            name: _answers(engine, rows, sampling[name], what=f"{model}: {name}", report=report, pictures=pictures)
            for name, rows in files.items()
        }


def _answers(
    engine: Responder,
    rows: Mapping[int, Row],
    sampling: SamplingSettings,
    *,
    what: str,
    report: Callable[[str], None],
    pictures: PictureFolder | None,
) -> AnsweredRows:
    began = time.perf_counter()
    found: dict[int, tuple[Completion, ...]] = {}
    skipped: list[SkippedRow] = []
    for done, outcome in enumerate(engine.respond(rows.items(), sampling), start=1):
        if outcome.reason is None:
            kept = outcome if pictures is None else outcome.with_images(pictures.kept)
            found[outcome.index] = kept.completions
        else:
            skipped.append(SkippedRow(index=outcome.index, reason=outcome.reason))
        if done % REPORTED_ROWS == 0 or done == len(rows):
            report(f"{what} {done}/{len(rows)} rows")
    if not found:
        raise UserError(f"none of {len(rows)} rows can be answered; the first: {skipped[0].reason}")
    return AnsweredRows(
        completions={index: found[index] for index in rows if index in found},
        skipped=tuple(skipped),
        seconds=time.perf_counter() - began,
    )


def judge_responses(
    completions: Mapping[int, Sequence[Completion]], *, checkpoint: str, row_set: RowSet, judges: Mapping[str, Judge]
) -> list[JudgedResponse]:
    """Return the responses with the verdicts of the file's verifiers, all samples of a row one after the other.

    Args:
        completions: by the row's place in the file.
        judges: by verifier, but for those that judge by an environment's reward; they are running.
    """
    asked = [
        (index, row_set.rows[index], sample, completion)
        for index, samples in completions.items()
        for sample, completion in enumerate(samples)
    ]
    items = [
        Item(
            prompt=question_of(row),
            response=completion.text,
            label=row.answer,
            image_scales=completion.image_scales,
        )
        for _, row, _, completion in asked
    ]
    played = [completion.played for _, _, _, completion in asked]
    judged = {
        verifier: judges[verifier].judge(items) if verifier in judges else environment_scores(verifier, played)
        for verifier in row_set.file.verifiers
    }
    return [
        JudgedResponse(
            checkpoint=checkpoint,
            file=row_set.file.name,
            index=index,
            row=row.location,
            datasource=row.datasource,
            label=row.answer,
            question=items[place].prompt,
            sample=sample,
            response=completion.text,
            response_tokens=completion.num_tokens,
            finish_reason=completion.finish_reason,
            verdicts={
                verifier: Verdict(
                    score=scores[place].score, parts=scores[place].parts, timed_out=scores[place].timed_out
                )
                for verifier, scores in judged.items()
            },
            episode=None if completion.played is None else episode_of(completion.played),
            images=len(images_of(row.messages)),
        )
        for place, (index, row, sample, completion) in enumerate(asked)
    ]


def question_of(row: Row) -> str:
    """Return the text of the user's turns."""
    return "\n".join(
        part.text
        for message in row.messages
        if message.role == "user"
        for part in message.parts
        if isinstance(part, TextPart)
    )
