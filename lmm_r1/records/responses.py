"""The responses of an evaluation with their verdicts: JSON lines, one per checkpoint, row and sample."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import unwritable
from lmm_r1.files.json_files import Count, append_json_lines, checked, read_json_lines


@dataclass(frozen=True, kw_only=True)
class VerifierVerdict:
    score: float
    """Right (1.0) or wrong (0.0), or in between for a verifier that gives partial credit."""
    parts: dict[str, float]
    timed_out: bool = False
    """Whether the answer was not judged within the time limit, which counts as wrong."""

    @property
    def right(self) -> bool:
        return self.parts.get("accuracy", self.score) > 0.5


@dataclass(frozen=True, kw_only=True)
class ShownTurn:
    role: str
    text: str
    """With the mark `<image>` for each picture."""
    images: tuple[str, ...] = ()
    """The picture files of the marks; in the file of responses, relative to its folder."""


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """An episode; the response is its last turn."""

    end: str
    """`over`, or the limit that ended it: `turns`, `images`, `tokens`."""
    turns: Count
    shown_images: Count
    """The number shown by the environment, not counting those of the prompt."""
    rewards: dict[str, float]
    counts: dict[str, int]
    """The environment's counts: tool calls, malformed calls, moves."""
    said: tuple[ShownTurn, ...]


@dataclass(frozen=True, kw_only=True)
class JudgedResponse:
    """One sample of one row."""

    checkpoint: str
    file: str
    """The name of the row file or the suite."""
    index: Count
    """The row's index among the records of its file, from 0."""
    row: str
    datasource: str
    label: str
    question: str
    sample: Count
    response: str
    response_tokens: Count | None
    finish_reason: str
    """`stop`, `length`, or `unknown` only in files of earlier versions."""
    verdicts: Annotated[dict[str, VerifierVerdict], Field(min_length=1)]
    episode: PlayedEpisode | None = None
    images: Count = 0
    """The number of the row's images; 0 in files of earlier versions."""

    @property
    def truncated(self) -> bool | None:
        """Whether the response was cut off at the maximum length; None if unknown."""
        return None if self.finish_reason == "unknown" else self.finish_reason == "length"


def write_responses(path: Path, responses: Iterable[JudgedResponse], *, append: bool) -> None:
    """Write one line per response: append to the file, or replace it as a whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        try:
            records = (_record(response, folder=path.parent) for response in responses)
            append_json_lines(path if append else partial, records)
            if not append:
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def responses_digest(responses: Iterable[JudgedResponse], *, folder: Path) -> str:
    """Return a digest of responses as they are written to a file in `folder`."""
    digest = hashlib.sha256()
    for response in responses:
        digest.update(json.dumps(_record(response, folder=folder)).encode())
    return digest.hexdigest()[:16]


def read_responses(path: Path) -> list[JudgedResponse]:
    """Return what `write_responses` wrote; raises UserError, with file and line, for anything else."""
    if not path.is_file():
        raise UserError(f"no file of responses {path}; `lmm-r1 evaluate` writes one next to its output")
    responses = []
    for line in read_json_lines(path):
        if line.record is None:
            raise UserError(f"{line.place}: the line is incomplete; evaluate again")
        responses.append(_response(line.record, place=line.place, folder=path.parent))
    if not responses:
        raise UserError(f"{path} holds no responses; evaluate again")
    return responses


def by_row(responses: Sequence[JudgedResponse]) -> list[list[JudgedResponse]]:
    """Return the samples of each row of one file, rows in the order of first occurrence."""
    rows: dict[int, list[JudgedResponse]] = {}
    for response in responses:
        rows.setdefault(response.index, []).append(response)
    return list(rows.values())


def _record(response: JudgedResponse, *, folder: Path) -> dict[str, object]:
    record = asdict(response)
    if response.episode is None:
        del record["episode"]
        return record
    for turn in record["episode"]["said"]:
        turn["images"] = [os.path.relpath(image, folder) for image in turn["images"]]
    return record


def _response(record: dict[str, object], *, place: str, folder: Path) -> JudgedResponse:
    response = checked(JudgedResponse, record, place=place)
    if response.episode is None:
        return response
    said = response.episode.said
    # They are embedded in pages that may be passed on, so no other file of this machine must get in.
    if any(Path(image).is_absolute() or ".." in Path(image).parts for turn in said for image in turn.images):
        raise UserError(
            f"{place}: the pictures of an episode must be files below the folder of this one; evaluate again"
        )
    found = (replace(turn, images=tuple(str(folder / image) for image in turn.images)) for turn in said)
    return replace(response, episode=replace(response.episode, said=tuple(found)))
