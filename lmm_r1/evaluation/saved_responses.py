"""Evaluations that were written down, taken up again: their scores and comparisons need no engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lmm_r1.config.evaluate import RESPONSES_SUFFIX, responses_path
from lmm_r1.data.files import read_good_rows
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.evaluation.answered_rows import question_of
from lmm_r1.evaluation.scoreboard.board import CheckpointResponses, MeasuredFile
from lmm_r1.evaluation.scores import powers_of_two
from lmm_r1.records.responses import JudgedResponse, by_row, read_responses

# How a row's location ends behind its file.
_PLACE = re.compile(r" (?:line|row) \d+$")


def saved_checkpoints(entries: Sequence[str], *, fewest: int = 2) -> list[CheckpointResponses]:
    """Return the checkpoints in files of responses; of two with one name, both are called `NAME (FILE)`.

    Args:
        entries: `PATH` for every checkpoint in a file, `NAME=PATH` for one of them; PATH is a file of responses, or
            the JSON that it stands beside.
        fewest: checkpoints that there must be.

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
        ks: of pass@k and majority@k; by default the powers of two up to the fewest samples of a row.

    Raises:
        UserError: no verifier judged a file for all checkpoints, or a row has fewer samples than a k.
    """
    names = dict.fromkeys(name for checkpoint in checkpoints for name in checkpoint.files)
    return [_file(name, [own.files[name] for own in checkpoints if name in own.files], ks=ks) for name in names]


def _parted(entry: str) -> tuple[str | None, Path]:
    """The name of the checkpoint, if one is asked for, and the file of responses."""
    name, equals, path = entry.rpartition("=")
    # A path may hold the sign, too.
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
    """Return the rows with images that the responses answer, by their place, where they still lie where they were read.

    A row counts only with the question that was answered: images of another one would mislead, and no file of this
    machine may get into a page because a file of responses from elsewhere names it.
    """
    pictured = {response.row: response for response in responses if response.images}
    found: dict[int, Row] = {}
    for path in {_PLACE.sub("", location) for location in pictured}:
        try:
            rows = read_good_rows(path, answer_required=False).rows if Path(path).is_file() else {}
        except UserError:
            # The row file of a suite has columns that its recipe reads.
            continue
        for row in rows.values():
            response = pictured.get(row.location)
            if response is not None and question_of(row) == response.question:
                found[response.index] = row
    return found
