"""A checkpoint's responses to files of rows, sampled or saved, with the verdicts of verifiers."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmm_r1.config.evaluate import RESPONSES_SUFFIX, responses_path
from lmm_r1.data.files import read_row_file
from lmm_r1.data.images import PictureFolder
from lmm_r1.data.messages import Row, TextPart, images_of
from lmm_r1.data.reading import SkippedRow
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.evaluation.row_set import RowSet
from lmm_r1.evaluation.scoreboard.board import CheckpointResponses, MeasuredFile
from lmm_r1.evaluation.scores import environment_scores, episode_of, powers_of_two
from lmm_r1.generation.engine import Responder, SamplingSettings
from lmm_r1.records.responses import JudgedResponse, VerifierVerdict, by_row, read_responses
from lmm_r1.scoring.response_scores import VerifierJudge
from remote_rm.verifier import Item

# Progress is reported each time this many rows are done.
REPORTED_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class AnsweredRows:
    """A checkpoint's responses to the rows of one file."""

    completions: dict[int, tuple[Completion, ...]]
    """By the row's index in the file, in that order, without rows that could not be answered."""
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
    """Return a model's responses to the rows of each file; `report` gets a line now and then.

    Raises UserError if the engine cannot be started, or cannot take any row of a file.

    Args:
        make: makes the model's engine.
        model: the model's name in the lines.
        pictures: the folder for pictures that episodes have shown.
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
    completions: Mapping[int, Sequence[Completion]],
    *,
    checkpoint: str,
    row_set: RowSet,
    judges: Mapping[str, VerifierJudge],
) -> list[JudgedResponse]:
    """Return the responses with the verdicts of the file's verifiers, all samples of a row together.

    Args:
        completions: by the row's index in the file.
        judges: the running judges by verifier; verifiers that judge by an environment's reward have none.
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
                verifier: VerifierVerdict(
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


# The end of a row's location, after its file.
_PLACE = re.compile(r" (?:line|row) \d+$")


def saved_checkpoints(entries: Sequence[str], *, fewest: int = 2) -> list[CheckpointResponses]:
    """Return the checkpoints in files of responses; if two have the same name, both are called `NAME (FILE)`.

    Args:
        entries: `PATH` for every checkpoint in a file, `NAME=PATH` for one of them; PATH is a file of responses, or
            the JSON next to it.
        fewest: the number of checkpoints required.

    Raises:
        UserError: a file is missing or malformed, lacks the named checkpoint, or there are too few checkpoints.
    """
    found: list[tuple[str, Path, list[JudgedResponse]]] = []
    for entry in entries:
        wanted, path = _parted(entry)
        by_name: dict[str, list[JudgedResponse]] = {}
        for response in read_responses(path):
            by_name.setdefault(response.checkpoint, []).append(response)
        if wanted is not None and wanted not in by_name:
            raise UserError(f"--compare {entry}: {path} has no checkpoint {wanted}; it has {', '.join(by_name)}")
        found += [(name, path, own) for name, own in by_name.items() if wanted in (None, name)]
    if len(found) < fewest:
        raise UserError(f"--compare {' '.join(entries)}: two checkpoints are needed to compare, found {len(found)}")
    names = [name for name, _, _ in found]
    titles = [
        f"{name} ({path.name.removesuffix(RESPONSES_SUFFIX)})" if names.count(name) > 1 else name
        for name, path, _ in found
    ]
    if len(set(titles)) < len(titles):
        raise UserError(f"--compare {' '.join(entries)}: the same checkpoint is given twice")
    return [_checkpoint(title, path, own) for title, (_, path, own) in zip(titles, found, strict=True)]


def saved_files(checkpoints: Sequence[CheckpointResponses], *, ks: tuple[int, ...] = ()) -> list[MeasuredFile]:
    """Return the files that the checkpoints answered, with the verifiers that judged all of them.

    Args:
        ks: for pass@k and majority@k; by default the powers of two up to the fewest samples of a row.

    Raises:
        UserError: no verifier judged a file for all checkpoints, or a row has fewer samples than a k.
    """
    names = dict.fromkeys(name for checkpoint in checkpoints for name in checkpoint.files)
    return [_file(name, [own.files[name] for own in checkpoints if name in own.files], ks=ks) for name in names]


def _parted(entry: str) -> tuple[str | None, Path]:
    """Return the name of the checkpoint, if one is given, and the file of responses."""
    name, equals, path = entry.rpartition("=")
    # A path may contain the sign, too.
    if equals and not Path(entry).exists():
        return name, _responses_file(Path(path))
    return None, _responses_file(Path(entry))


def _responses_file(path: Path) -> Path:
    return responses_path(path) if path.suffix == ".json" else path


def _checkpoint(title: str, path: Path, responses: Sequence[JudgedResponse]) -> CheckpointResponses:
    files: dict[str, list[JudgedResponse]] = {}
    for response in responses:
        files.setdefault(response.file, []).append(replace(response, checkpoint=title))
    return CheckpointResponses(name=title, path=str(path), files=files)


def _file(name: str, answered: Sequence[Sequence[JudgedResponse]], *, ks: tuple[int, ...]) -> MeasuredFile:
    everything = [response for responses in answered for response in responses]
    verifiers = tuple(
        verifier
        for verifier in everything[0].verdicts
        if all(verifier in response.verdicts for response in everything)
    )
    if not verifiers:
        raise UserError(f"{name}: no verifier judged it for all checkpoints; evaluate with the same --verifiers")
    fewest = min(len(row) for responses in answered for row in by_row(responses))
    too_many = [k for k in ks if not 1 <= k <= fewest]
    if too_many:
        raise UserError(f"--k {too_many[0]}: {name} has rows with {fewest} samples, so k must be from 1 to {fewest}")
    return MeasuredFile(
        name=name,
        source=_PLACE.sub("", everything[0].row),
        rows=_rows_at_hand(everything),
        verifiers=verifiers,
        ks=tuple(sorted(set(ks))) or tuple(powers_of_two(fewest)),
    )


def _rows_at_hand(responses: Sequence[JudgedResponse]) -> dict[int, Row]:
    """Return the rows with images that the responses answer, by index, if their file still exists.

    A row counts only if its question is the one that was answered: other images would mislead. It also keeps files of this
    machine out of a page if a file of responses from elsewhere names them.
    """
    pictured = {response.row: response for response in responses if response.images}
    found: dict[int, Row] = {}
    for path in {_PLACE.sub("", location) for location in pictured}:
        try:
            rows = read_row_file(path, answer_required=False, bad_rows="skip").rows if Path(path).is_file() else {}
        except UserError:
            # Only a recipe can read the row file of a suite.
            continue
        for row in rows.values():
            response = pictured.get(row.location)
            if response is not None and question_of(row) == response.question:
                found[response.index] = row
    return found
